"""One HTTP answer while its tokens come: collected, or streamed as server-sent events.

A stream writes its own HTTP chunks to the transport, one write a token, from parts that were encoded when it began:
about 10 µs a token, where awaiting a response object's write costs several times that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from engines.sim.connectors.base import Leg
from engines.sim.flavour import ChoiceResult, Flavour, Heading, Json
from engines.sim.generation import Asked, Refused
from engines.sim.rank import Sink
from engines.sim.request import Request
from engines.sim.tokens import Answers

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_NO_IDS, _NO_PROMPT = b'"token_ids":null', b'"prompt_token_ids":null'
"""Where vLLM tells tokens; text cannot hold these, as its quotes are escaped. SGLang's answers have no such place."""


class Answer:
    """All choices of one answer, collected. `done` resolves when the last is finished.

    With `break_after` the connection is cut instead of handing out any token after that many. A stream that is not
    `chunked` is for an HTTP/1.0 client, and ends with the connection.
    """

    def __init__(
        self,
        heading: Heading,
        asked: Asked,
        requests: Sequence[Request],
        flavour: Flavour,
        answers: Answers,
        transport: asyncio.WriteTransport,
        leg: Leg,
        break_after: int | None = None,
        *,
        chunked: bool = True,
    ) -> None:
        self.heading = heading
        self.asked = asked
        self.requests = requests
        self.flavour = flavour
        self.answers = answers
        self.transport = transport
        self.write: Callable[[bytes], object] = transport.write
        """Where a stream's choices write; another place before the HTTP head is out."""
        self.leg = leg
        self.chunked = chunked
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unfinished = len(requests)
        self._tokens_left = break_after

    def sinks(self) -> Sequence[Sink]:
        """One for each request, in order."""
        return [Collect(self) for _ in self.requests]

    def broken(self) -> bool:
        """Whether the connection is cut: by its other end, or now, before the token at hand."""
        if self.transport.is_closing():
            return True
        if self._tokens_left is None:
            return False
        self._tokens_left -= 1
        if self._tokens_left < 0:
            self.transport.abort()
            return True
        return False

    def finish_one(self) -> bool:
        """One choice is finished; True when all are."""
        self._unfinished -= 1
        if not self._unfinished and not self.done.done():
            self.done.set_result(None)
        return not self._unfinished

    def usage(self, streamed: bool) -> Json:
        """A prompt with several answers counts once, with what the first found in the cache."""
        first = self.requests[:: self.asked.n]
        prompt = sum(request.prompt_length for request in first)
        generated = sum(request.generated for request in self.requests)
        cached = sum(request.cached_tokens for request in first)
        return self.flavour.usage(prompt, generated, cached, self.heading, streamed)

    def whole(self) -> bytes:
        """The JSON of a finished answer."""
        choices = [
            ChoiceResult(
                self.answers.text(request.answer_start, request.generated),
                request,
                self.asked.finish_reason,
                self.asked.return_token_ids,
            )
            for request in self.requests
        ]
        answer = self.flavour.answer(self.heading, choices, self.usage(streamed=False))
        params = self.leg.answer_params()
        return _encode(answer if params is None else {**answer, "kv_transfer_params": params})

    def fail(self, refused: Refused) -> None:
        """There will be no (further) token."""
        if not self.done.done():
            self.done.set_exception(refused)

    def stream_end(self) -> bytes:
        """The events after all choices' last tokens."""
        if not self.asked.include_usage:
            return DONE
        chunk = self.flavour.usage_chunk(self.heading, self.usage(streamed=True))
        return b"data: %b\n\n%b" % (_encode(chunk), DONE)


class Collect:
    """A choice whose tokens wait for the others."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def on_token(self, position: int, finished: bool) -> None:  # noqa: ARG002 - the text is read at the end
        if not self._answer.broken() and finished:
            self._answer.finish_one()


class StreamedAnswer(Answer):
    """Its choices write to the transport as their tokens come; unless it is held, the HTTP head must be out before."""

    def sinks(self) -> Sequence[Sink]:
        return [Stream(self, request, index) for index, request in enumerate(self.requests)]

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Entered when the first choice writes or all have failed. What they write goes out when it is left."""
        held: list[bytes] = []
        begun = asyncio.Event()

        def hold(events: bytes) -> None:
            held.append(events)
            begun.set()

        self.write = hold
        self.done.add_done_callback(lambda _: begun.set())
        await begun.wait()
        yield
        self.write = self.transport.write
        if held and not self.transport.is_closing():
            self.write(b"".join(held))


class Stream:
    """A choice that writes each token at once."""

    def __init__(self, answer: Answer, request: Request, choice: int) -> None:
        template = answer.flavour.chunk_template(answer.heading, choice, answer.asked.finish_reason)
        self._answer = answer
        self._request = request
        self._pieces = answer.answers.json_pieces
        self._start = request.answer_start % len(self._pieces)
        self._opening = _event(template.opening)
        self._head = b"data: " + template.head
        self._end = template.no_usage + b"\n\n"
        self._tail = template.tail
        self._plain_tail = template.tail + self._end
        self._last_tail = template.last_tail
        self._closing = _event(template.closing)
        asked = answer.asked
        self._plain = answer.chunked and not (asked.continuous_usage or asked.return_token_ids)
        """Whether tokens between the first and the last differ in their text alone."""

    def on_token(self, position: int, finished: bool) -> None:
        answer = self._answer
        if answer.broken():
            return
        piece = self._pieces[(self._start + position) % len(self._pieces)]
        if finished:
            self._finish(position, piece)
        elif position == 0 or not self._plain:
            self._chunk(self._events(position, piece, self._tail))
        else:
            head, tail = self._head, self._plain_tail
            answer.write(b"%x\r\n%b%b%b\r\n" % (len(head) + len(piece) + len(tail), head, piece, tail))

    def _finish(self, position: int, piece: bytes) -> None:
        last = self._events(position, piece, self._last_tail) + self._closing
        self._chunk(last + self._answer.stream_end() if self._answer.finish_one() else last)

    def _events(self, position: int, piece: bytes, tail: bytes) -> bytes:
        """Of one token, and before the first what opens the stream."""
        event = b"%b%b%b%b" % (self._head, piece, tail, self._ending())
        opening = self._opening if position == 0 else b""
        if not self._answer.asked.return_token_ids:
            return opening + event
        tokens, prompt = self._request.tokens, self._request.prompt_length
        event = event.replace(_NO_IDS, b'"token_ids":[%d]' % tokens[prompt + position])
        if position:
            return opening + event
        return (opening + event).replace(_NO_PROMPT, b'"prompt_token_ids":%b' % _encode(tokens[:prompt]))

    def _ending(self) -> bytes:
        if not self._answer.asked.continuous_usage:
            return self._end
        return b',"usage":%b}\n\n' % _encode(self._answer.usage(streamed=True))

    def _chunk(self, events: bytes) -> None:
        self._answer.write(b"%x\r\n%b\r\n" % (len(events), events) if self._answer.chunked else events)


def _event(chunk: bytes) -> bytes:
    return b"data: %b\n\n" % chunk if chunk else b""
