"""One HTTP exchange, blocking, and what a test reads from it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Status 0: nothing answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def worker(self) -> str | None:
        return self.headers.get("x-router-worker")

    @property
    def predicted(self) -> int:
        """Prompt tokens that the router expected to be cached."""
        return int(self.headers["x-router-overlap-tokens"])

    @property
    def reported(self) -> int:
        """Prompt tokens that the engine says were cached; engines leave out a zero."""
        usage = self.usage
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def usage(self) -> dict[str, Any]:
        found: dict[str, Any] = next(part["usage"] for part in reversed(self._parts()) if part.get("usage"))
        return found

    @property
    def token_ids(self) -> list[int]:
        """What was generated first; for requests with return_token_ids."""
        choices = (choice for part in self._parts() for choice in part["choices"] if choice["index"] == 0)
        return [token for choice in choices for token in choice.get("token_ids") or []]

    def json(self) -> Any:
        return json.loads(self.body)

    def _parts(self) -> list[dict[str, Any]]:
        """The chunks of a stream, or the one answer."""
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            return [json.loads(self.body)]
        lines = (line.removeprefix(b"data:").strip() for line in self.body.splitlines() if line.startswith(b"data:"))
        *chunks, end = lines
        assert end == b"[DONE]"
        return [json.loads(chunk) for chunk in chunks]


def ask(url: str, body: object = None, *, headers: Mapping[str, str] | None = None, post: bool = True) -> Answer:
    """POST of JSON (bytes go as they are), or GET."""
    data = None if not post else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return Answer(response.status, _lower(response.headers), response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _lower(error.headers), error.read())
    except OSError as error:
        return Answer(0, {}, repr(error).encode())


def get(url: str) -> Answer:
    return ask(url, post=False)


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
