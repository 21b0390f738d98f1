"""Records the tokens that a client has been sent of a stream, so that another worker can continue exactly there.

Engines hold text back while it ends in the middle of a character. So a token whose event has no text has not reached
the client yet (and if a continuation began inside a character, vLLM would send the whole prompt's text first). Such
events wait here until text follows, and are dropped when the stream breaks. Where an event has several tokens, the text
of any but the first may be held back; only a tokenizer can tell which. Nor can anybody else tell such a token from what
a parser of tools or reasoning keeps to itself: vLLM with one leaves the content out of both.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engines.answers import ENGINE_DIED, UNDECODABLE
from router.migration.chunk import (
    ABSENT,
    DATA,
    NULL,
    Choice,
    Chunk,
    decode_chunk,
    decode_error,
    decode_fields,
    decode_ids,
    is_data,
    without_ids,
    write_event,
)
from router.migration.rewriting import NAMES, Fields, Rewriting

MOST_HELD = 64
"""The most events that wait for text. A character has at most four bytes, but special tokens have no text at all."""
_SERVER_ERROR = 500
_END = b"data: [DONE]"
_PARSED = "its engine reads tools or reasoning out of the answer, or says what is not known here"

Ends = Callable[[Sequence[int]], bool]
"""Whether the text of these tokens ends with a whole character."""


class Record:
    """The record of one stream with one choice, across all workers that produce it."""

    def __init__(self, chat: bool, shows_ids: bool, ends: Ends | None) -> None:
        """`shows_ids`: the client itself asked for token ids, so they stay in what it is sent. `ends` is None where
        there is no tokenizer."""
        self._chat = chat
        self._shows_ids = shows_ids
        self._ends = ends
        self.prompt: array[int] | None = None
        """The prompt as the engine tokenised it; None until the engine has sent it."""
        self.output: array[int] = array("I")
        """The tokens whose text the client was sent."""
        self.failure: str | None = None
        """The error with which the worker broke off; the rest of its stream is ignored."""
        self._trouble: str | None = None
        """Why the stream cannot be continued; None: nothing speaks against it so far."""
        self._names: Fields = {}
        """The fields that all events of the stream have in common."""
        self._rewriting: Rewriting | None = None
        """Makes the events of the present worker the stream's; None while that is the first worker."""
        self._held: list[bytes] = []
        """Events that wait for text, as they will be sent."""
        self._held_ids: array[int] = array("I")
        """Their tokens."""
        self._loose = 0
        """How many of the last tokens in `output` may have no text yet: all but the first of the latest event."""
        self._finished = False
        """Whether an event told why the answer ends."""
        self._counted = False
        """Whether an event told the usage."""
        self._done = False
        """Whether the stream has come to its end."""

    def feed(self, event: bytes) -> bytes:
        """Takes one whole event; returns what to send to the client."""
        if self.failure is not None:
            return b""
        if self._rewriting:
            event = self._rewritten(self._rewriting, event)
        if event.startswith(_END):
            self._done = True
            return self._release() + event
        if not is_data(event):  # a comment: events that wait go on waiting
            return event
        return self._shown(event) if self._trouble else self._note(event)

    @staticmethod
    def _rewritten(rewriting: Rewriting, event: bytes) -> bytes:
        try:
            return rewriting.event(event)
        except UNDECODABLE:
            return event

    def lose(self) -> None:
        """Says that a part of the stream was not recorded, so that it cannot be continued."""
        self._trouble = "an event of it was too long"

    def _note(self, event: bytes) -> bytes:
        try:
            chunk = self._read(event[len(DATA) :])
        except UNDECODABLE:
            return self._give_up(_PARSED, event)
        if _tells_error(chunk):
            return self._fail(chunk, event)
        if len(chunk.choices) != 1:
            self._counted |= chunk.usage is not ABSENT
            return self._release() + event
        return self._take(chunk.choices[0], event)

    def _read(self, data: bytes) -> Chunk:
        """Decodes a chunk, and keeps the fields that belong to the whole stream."""
        chunk = decode_chunk(data)
        self._take_prompt(chunk)
        if not self._names and not _tells_error(chunk):
            fields = decode_fields(data)
            # copies: a slice would keep the whole event in memory, with the prompt's tokens
            self._names = {name: fields[name].copy() for name in NAMES if name in fields}
        return chunk

    def _take(self, choice: Choice, event: bytes) -> bytes:
        ids, text, finished = choice.token_ids, choice.text, choice.finish_reason is not None
        if choice.delta is not None:
            text = choice.delta.content or ""
            if choice.delta == _NOTHING and not finished:
                return self._take_unsaid(ids, event)
        if choice.finish_reason == "abort":
            self.failure = "aborted the request"
            return b""
        self._finished |= finished
        if text and (not ids or self.prompt is None):
            return self._give_up("the engine does not tell its tokens", event)
        if not text and not finished:
            return self._hold(ids, event) if ids else self._shown(event)
        self.output += self._held_ids
        if ids:
            self.output.extend(ids)
            self._loose = len(ids) - 1
        return self._release() + self._shown(event)

    def _take_unsaid(self, ids: list[int] | None, event: bytes) -> bytes:
        """Takes an event of a chat that says nothing but token ids, if any: it would not be there without them."""
        if not ids or self._ends is None or self._ends(self.output + self._held_ids + array("I", ids)):
            return self._give_up(_PARSED, event)
        return self._hold(ids, event if self._shows_ids else b"")

    def _take_prompt(self, chunk: Chunk) -> None:
        if self.prompt is not None:
            return
        for told in (chunk.prompt_token_ids, *(choice.prompt_token_ids for choice in chunk.choices)):
            if told is not ABSENT and told != NULL:
                self.prompt = array("I", decode_ids(told))

    def _shown(self, event: bytes) -> bytes:
        return event if self._shows_ids else without_ids(event)

    def _hold(self, ids: list[int], event: bytes) -> bytes:
        self._held.append(self._shown(event))
        self._held_ids.extend(ids)
        if len(self._held) > MOST_HELD:
            return self._give_up("its latest tokens have no text", b"")
        return b""

    def _release(self) -> bytes:
        """Returns the events that waited for text."""
        if not self._held:
            return b""
        held = b"".join(self._held)
        self._forget()
        return held

    def _forget(self) -> None:
        self._held.clear()
        del self._held_ids[:]

    def _give_up(self, trouble: str, event: bytes) -> bytes:
        self._trouble = trouble
        return self._release() + self._shown(event)

    def _fail(self, chunk: Chunk, event: bytes) -> bytes:
        error = _error(chunk, event)
        of_request = isinstance(error.code, int) and error.code < _SERVER_ERROR
        if of_request and not error.message.startswith(ENGINE_DIED):
            return self._release() + event
        self.failure = f"says: {error.message}"
        return b""

    # -- when the worker has broken off

    @property
    def done(self) -> bool:
        """The stream has come to its end."""
        return self._done

    def ending(self, with_usage: bool) -> bytes | None:
        """The events still missing after the last token; None if tokens are missing too."""
        if not self._finished:
            return None
        if self._done:
            return b""
        return b"".join(self._last_events(with_usage))

    def _last_events(self, with_usage: bool) -> Iterator[bytes]:
        if with_usage and not self._counted and self.prompt is not None:
            whole = Rewriting({}, self._chat, len(self.prompt), len(self.output))
            yield write_event({**self._names, "choices": [], "usage": whole.usage({})})
        yield _END + b"\n\n"

    def cut(self) -> str | None:
        """Forgets what was not sent. Returns why the stream cannot be continued, or None if it can: after `output`, or
        from the start where that is empty."""
        self._forget()
        self.failure = None
        if not self.output and not self._chat:  # nothing was sent
            self._names, self.prompt = {}, None
        if self._trouble is None and self._loose:
            self._trouble = self._cut_loose()
        if self._trouble is None:
            before, prompt = len(self.output), len(self.prompt or ())
            self._rewriting = Rewriting(self._names, self._chat, prompt, before)
        return self._trouble

    def _cut_loose(self) -> str | None:
        """Drops the last tokens whose text was held back, where several came in one event. Returns why that is
        impossible, if it is."""
        ends = self._ends
        if ends is None:
            return "its latest tokens came together, and there is no tokenizer to tell where their text ends"
        spare = next((spare for spare in range(self._loose + 1) if ends(self.output[: len(self.output) - spare])), None)
        if spare is None or (spare and self._shows_ids):
            return "its latest tokens end in the middle of a character"
        del self.output[len(self.output) - spare :]
        return None


def _tells_error(chunk: Chunk) -> bool:
    return chunk.error is not ABSENT or chunk.object == "error"


def _error(chunk: Chunk, event: bytes) -> Any:
    try:
        return decode_error(event[len(DATA) :] if chunk.error is ABSENT else chunk.error)
    except UNDECODABLE:
        return decode_error(b"{}")


_NOTHING = decode_chunk(b'{"choices":[{"delta":{}}]}').choices[0].delta
