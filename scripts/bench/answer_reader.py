"""Finds the end of HTTP/1.1 answers, with a length or in chunks, without keeping their bodies."""

from __future__ import annotations

import httptools


class AnswerReader:
    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._status: int | None = None
        self.size = 0
        """Bytes of the body of the last answer."""

    def feed(self, data: bytes) -> int | None:
        """The status of an answer that `data` completes."""
        self._status = None
        self._parser.feed_data(data)
        return self._status

    def on_message_begin(self) -> None:
        self.size = 0

    def on_body(self, body: bytes) -> None:
        self.size += len(body)

    def on_message_complete(self) -> None:
        self._status = self._parser.get_status_code()
