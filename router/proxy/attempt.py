"""One attempt at a worker: the request sent there, and its answer relayed to the client.

The attempt knows how an answer comes. What follows when it fails, or is at its end, the exchange decides.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from router.http.edited import EditedBody
from router.http.messages import connection_line
from router.http.relay import AsEvent, Events, Rechunked, Relay, Unchunked, relay_for
from router.http.upstream import Head
from router.migration.migrating import Migration
from router.openai.errors import as_event, error_response
from router.proxy.failures import RETRY_STATUSES, Failure, answered
from router.proxy.legs import Leg, response_head
from router.proxy.opening import Opening, error_status, is_aborted
from router.proxy.outcome import Silence
from router.proxy.sending import Sending
from router.proxy.usage import read_usage

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange

logger = logging.getLogger(__name__)

_AN_ERROR = "answered 200, and an error where its stream should begin"


class Attempt:
    """Implements `upstream.Receiver`."""

    __slots__ = (
        "_chunks",
        "_exchange",
        "_head",
        "_length",
        "_opening",
        "_seen",
        "_seen_at",
        "_sending",
        "_sent_at",
        "begun",
        "leg",
        "relay",
    )

    def __init__(self, exchange: Exchange, leg: Leg, interrupted: Relay | None) -> None:
        """`interrupted`: relays the stream that the worker is to continue; None: it answers from the beginning."""
        self._exchange = exchange
        self.leg = leg
        self.begun = False
        """Whether the client has anything of this worker's answer."""
        self.relay = interrupted
        self._head: Head | None = None
        self._length: int | None = None
        """The head and its Content-Length, once they have come."""
        self._opening: Opening | None = None
        """The beginning of a decode worker's stream, for `Opening` to judge; None: nothing is judged."""
        self._chunks = 0
        """Chunks of the answer that the reservation was told of."""
        self._sent_at = exchange.clock()
        self._seen: bytes | None = None
        """The latest piece of the answer at the watchdog's last check."""
        self._seen_at = self._sent_at
        """When that check found a new piece, or when the worker owed nothing."""
        self._sending: Sending | None = None
        """None before `start`, and once the attempt is over."""

    def start(self) -> None:
        exchange = self._exchange
        request, split = exchange.request, exchange.split
        receiver = split.receiver(self, self._settle) if split else self
        self._sending = sending = Sending(self.leg, receiver, exchange.fail, request.head.method == b"HEAD")
        sending.start(request, split.name if split else exchange.request_id)

    def _settle(self) -> None:
        if self._sending:
            self._sending.settle()

    def drop(self) -> None:
        """End it before the worker has answered."""
        sending, self._sending, self.relay = self._sending, None, None
        if sending:
            sending.drop()

    def complete(self) -> tuple[int | None, int | None]:
        """The answer has been relayed to its end. Returns its usage: (prompt tokens, cached tokens)."""
        sending, self._sending, self.relay = self._sending, None, None
        upstream = sending.connection if sending else None
        # It is back in its pool, but keeps its last pieces until its next request.
        return read_usage(upstream.recent, upstream.latest) if upstream else (None, None)

    @property
    def latest(self) -> bytes:
        """The last two pieces of the answer's body."""
        upstream = self._sending.connection if self._sending else None
        return upstream.recent + upstream.latest if upstream else b""

    def pause(self) -> None:
        if self._sending and self._sending.connection:
            self._sending.connection.pause()

    def resume(self) -> None:
        if self._sending and self._sending.connection:
            self._sending.connection.resume()

    def silence(self, now: float) -> Silence | None:
        """As `Exchange.silence`."""
        upstream = self._sending.connection if self._sending else None
        if upstream is None or upstream.paused:
            self.excuse(now)
            return None
        moved = upstream.latest is not self._seen and upstream.latest != b""
        if moved:
            self._seen, self._seen_at = upstream.latest, now
        return Silence(self.leg.worker, self._seen_at, "rest" if self.begun else "beginning", moved)

    @property
    def moved_at(self) -> float:
        """When a new piece of the answer was last found, or nothing was owed."""
        return self._seen_at

    def excuse(self, now: float) -> None:
        """The worker owes nothing at the moment, so its silence counts from `now`."""
        self._seen_at = now

    # -- upstream.Receiver

    def on_head(self, head: Head, length: int | None) -> None:
        exchange = self._exchange
        if self.relay is not None:
            self._continue_with(head)
            return
        if head.status in RETRY_STATUSES and exchange.retries(answered(head.status)):
            return
        self._head = head
        self._length = length
        self.relay = self._relay_for(head)

    def _relay_for(self, head: Head) -> Relay:
        exchange = self._exchange
        migration, split, asked = exchange.migration, exchange.split, exchange.request.head
        if exchange.opened and not head.events:  # the client was told of events
            return AsEvent(head, partial(as_event, head.status, path=asked.path))
        if exchange.opened and head.framing != "chunked":  # and of chunks
            return Rechunked(events=True)
        if split:
            self._opening = Opening() if head.events and head.framing == "chunked" else None
            return split.relay(head, asked.http_1_0)
        recorded = migration.relay(head) if migration else None
        return recorded or relay_for(head, asked.http_1_0)

    def on_body(self, data: bytes, boundary: int) -> None:
        sending, head, relay, exchange = self._sending, self._head, self.relay, self._exchange
        if sending is None or head is None or relay is None or sending.connection is None:
            return
        opening = self._opening
        if opening:
            data, boundary = opening.add(data, boundary)
            if self._retries_if(opening.fails(data), data, _AN_ERROR) or opening.hold(data, boundary):
                return
            self._opening = None  # the answer goes to the client
        out = relay.body(data, boundary)
        # Told in any case: what follows an event that is held back here must not overtake it.
        sending.connection.pass_events(exchange.connection.write if relay.clean else None)
        if isinstance(relay, EditedBody) or (exchange.migration and self._breaks_down(exchange.migration, out)):
            return
        if exchange.first_byte is not None:
            if out:
                exchange.connection.write(out)
        elif out and not (head.events and self._begins_with_error(head, relay, out)):
            self._begin_answer(head, relay, out)

    def _begins_with_error(self, head: Head, relay: Relay, out: bytes) -> bool:
        """Whether a stream's first event is an error. Then another worker is tried, or the client gets it as it is; it
        counts as an answer with the status that it would have had as one."""
        status, exchange = error_status(out), self._exchange
        if status is None:
            return False
        final = exchange.split is not None or status not in RETRY_STATUSES  # a decode worker's was judged by `Opening`
        if final or not exchange.retries(answered(status)._replace(reason=_AN_ERROR)):
            self._head = failed = head._replace(status=status)
            self._begin_answer(failed, relay, out)
        return True

    def _retries_if(self, fails: bool, data: bytes, reason: str) -> bool:
        """`data`: the answer, or how it begins."""
        return fails and self._exchange.retries(_failure(data, reason))

    def on_chunks(self, chunks: int) -> None:
        if self._sending:
            try:
                self.leg.reservation.generated(chunks - self._chunks, self._exchange.clock())
            except Exception:  # as in `_learn`
                logger.exception("Tokens could not be learned from")
        self._chunks = chunks

    def on_end(self) -> None:
        head, relay, exchange = self._head, self.relay, self._exchange
        if head is None or relay is None:
            return
        if exchange.migration and not exchange.migration.whole:
            exchange.fail(Failure("broken", "ended its answer before it was whole"))
            return
        held = relay.body(*self._opening.add(b"", 0)) if self._opening else b""
        out = held + relay.end()
        if isinstance(relay, EditedBody) and self._retries_if(is_aborted(out), out, "aborted its answer"):
            return
        if exchange.first_byte is None:
            self._begin_answer(head, relay, out)
        elif out:
            exchange.connection.write(out)
        exchange.end(head.status, relay)

    def on_broken(self, reason: str) -> None:
        sending, exchange = self._sending, self._exchange
        if self.begun and self._is_done():
            self._end_done()
        elif self.begun:
            exchange.fail(Failure("broken", f"broke off its answer: {reason}"))
        elif sending and not self._again(sending):
            exchange.fail(Failure("broken", f"broke off before its first byte: {reason}"))

    def _again(self, sending: Sending) -> bool:
        """Whether the request is sent again, because the worker had closed the connection while it was idle."""
        after = self._exchange.clock() - self._sent_at
        if self._exchange.split:
            return sending.was_stale(after) and self._exchange.start_over(self.leg.worker)
        return sending.again(after)

    def _is_done(self) -> bool:
        upstream, relay = self._sending and self._sending.connection, self.relay
        return bool(upstream and isinstance(relay, Events | Unchunked) and relay.is_done(upstream.latest))

    def _end_done(self) -> None:
        exchange, relay = self._exchange, self.relay
        if isinstance(relay, Unchunked):
            exchange.end(200, relay)  # whose client waits for no last chunk, but for the connection's end
        else:
            exchange.end_stream()

    # -- the first byte

    def _begin_answer(self, head: Head, relay: Relay, body: bytes) -> None:
        """The first byte is here: from now on no other worker can be tried, and the prefill is done. The latency model
        learns from it after the client has it."""
        exchange = self._exchange
        now = exchange.clock()
        self.begun = True
        exchange.first_byte = now - exchange.began
        exchange.connection.write(body if exchange.opened else self._client_head(head, relay) + body)
        exchange.on_begun(self.leg.worker, head, body)
        self._learn(head, now)

    def _client_head(self, head: Head, relay: Relay) -> bytes:
        exchange = self._exchange
        asked = exchange.request.head
        keep_alive = asked.keep_alive and not relay.until_close and not exchange.connection.closing
        edited = isinstance(relay, EditedBody)  # it states a length of its own
        length = b"" if self._length is None or edited else b"content-length: %d\r\n" % self._length
        framing = length + relay.framing + connection_line(keep_alive, asked.http_1_0) + asked.answer_lines
        return response_head(head, self.leg, exchange.request_id, framing)

    def _learn(self, head: Head, now: float) -> None:
        """What the first byte teaches. A fault there costs neither the answer nor the release at its end."""
        booking = self.leg.reservation
        try:
            if head.status not in RETRY_STATUSES:
                self._exchange.on_answered(self.leg)
            if head.is_error:  # an error says nothing about the prefill's time
                booking.assume_first_token(now)
            else:
                booking.first_token(now)
        except Exception:
            logger.exception("A first byte could not be learned from")

    # -- a stream that another worker began

    def _continue_with(self, head: Head) -> None:
        exchange, migration = self._exchange, self._exchange.migration
        relay = migration.relay(head) if migration else None
        if relay:
            self._head, self.relay = head, relay
            if exchange.paused:  # the client is still behind
                self.pause()
        elif head.status in RETRY_STATUSES:
            exchange.fail(answered(head.status))
        else:  # the request is at fault, not the worker
            worker = self.leg.worker.id
            exchange.end_with(error_response(502, f"Worker {worker} answered {head.status} when it was to go on."))

    def _breaks_down(self, migration: Migration, out: bytes) -> bool:
        """Whether nothing more is to be done with this piece: it reports a failure, or there is nothing to send yet."""
        exchange = self._exchange
        if out and self._head and exchange.first_byte is not None and not self.begun:
            self.begun = True
            migration.count("continued")
            self._learn(self._head, exchange.clock())
        if migration.failure is None:
            return not out
        if out and exchange.first_byte is not None:
            exchange.connection.write(out)
        exchange.fail(Failure("error", f"broke off its answer: it {migration.failure}"))
        return True


def _failure(data: bytes, reason: str) -> Failure:
    """Of a worker whose answer begins with `data`."""
    return answered(error_status(data) or 500)._replace(reason=reason)
