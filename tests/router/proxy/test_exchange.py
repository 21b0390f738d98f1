"""One request from client to worker and back, between transports that only remember: what is booked meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.disaggregation.answer import Prefilled
from router.http.chunked import decode_chunks
from router.http.clients import Clients, Limits
from router.http.front import Connection
from router.http.messages import Request, Response
from router.http.pool import Pool
from router.http.upstream import BOOKED, KnownHeads, WorkerConnection
from router.migration.migrating import Migration, Migrations
from router.openai.errors import error_response
from router.openai.inference import parse_inference
from router.proxy.exchange import Exchange
from router.proxy.failures import Failure
from router.proxy.legs import Leg, Pair
from router.proxy.outcome import Outcome
from router.proxy.sending import STALE_WITHIN
from router.scheduling.balance import LeastLoaded
from router.scheduling.decision import Choice, Decision
from router.scheduling.load import Load, LoadBook
from router.scheduling.scheduler import Scheduler
from router.workers.fleet import Fleet
from router.workers.spec import parse_worker
from router.workers.worker import Worker
from tests.router.http.test_chunked import chunk, pieces_of
from tests.router.http.test_front import FakeTransport
from tests.router.scheduling.candidates import Scripted, named, rank
from tests.router.scheduling.predictions import prefill_factors, unfit

PROMPT = 100
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = chunk(b"data: x\n\n")
LAST = b"0\r\n\r\n"


class Relayed:
    """A client, the worker "a" that its request goes to, and the books."""

    def __init__(
        self,
        request: bytes = b"POST /v1/x HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}",
        held: bool = False,
        others: int = 0,
        on_first_bytes: Callable[[Worker, bytes], None] | None = None,
        unrecorded: bool = False,
        commented: bool = False,
    ) -> None:
        """`held`: it is routed when the test says so. `others`: workers that it could be sent to after the first.
        `on_first_bytes`: as an exchange's. `unrecorded`: streams may go on elsewhere, but not this one. `commented`: it
        is a stream whose client may be sent comments."""
        self.others = others
        self.commented = commented
        self.on_first_bytes = on_first_bytes
        self.migration = _unrecorded() if unrecorded else None
        self.now = 1000.0
        self.scheduler = Scheduler(LeastLoaded(), LoadBook(), Scripted([]))
        self.scheduler.watch(rank("a"), 16)
        self.worker = Worker(parse_worker("http://a:1,name=a"), Pool("http://a:1", 1.0))
        self.outcomes: list[Outcome] = []
        self.failures: list[str] = []
        self.waiting: Callable[[Leg | Pair | Response], None] | None = None
        self.held = held
        self.withdrawn = 0
        self.client = FakeTransport()
        self.clients: Clients[Connection] = Clients(Limits(1000))
        self.under_way = set[Exchange]()
        self._accept(request)

    def _accept(self, request: bytes) -> None:
        self.connect()
        self.connection = Connection(self._serve, error_response, self.clients, lambda seconds, call: None)
        self.connection.connection_made(self.client)
        self.connection.data_received(request)

    def connect(self) -> None:
        """One connection to the worker, for the next request."""
        self.upstream = FakeTransport()
        self.at_worker = WorkerConnection(KnownHeads(), self.worker.pool._give_back, self.worker.pool._discard)
        self.at_worker.connection_made(self.upstream)
        self.worker.pool._give_back(self.at_worker)

    def _serve(self, request: Request, connection: Connection) -> Exchange:
        exchange = Exchange(
            request,
            b"id",
            connection,
            self,
            lambda: self.now,
            self.under_way,
            streamed=self.commented,
            migration=self.migration,
            on_first_bytes=self.on_first_bytes,
            commented=self.commented,
        )
        exchange.start()
        return exchange

    # -- router.proxy.routing.Routing

    def route(self, exclude: frozenset[str], routed: Callable[[Leg | Pair | Response], None]) -> None:
        self.waiting = routed
        if not self.held:
            self.send()

    def go_on(self, prefill: Leg, answer: Prefilled, exclude: frozenset[str]) -> Leg | Failure:
        raise AssertionError("no request here has two parts")

    def prefilled(self, prefill: Leg, answer: Prefilled) -> None:
        raise AssertionError("no request here has two parts")

    def withdraw(self) -> None:
        self.withdrawn += 1
        self.waiting = None

    def can_retry(self, exclude: frozenset[str]) -> bool:
        return len(exclude) <= self.others

    def waits_for(self, unreachable: frozenset[str]) -> bool:
        return False

    def resume(self, migration: Migration, exclude: frozenset[str]) -> frozenset[str] | None:
        raise AssertionError("no stream here goes on elsewhere")

    def answered(self, leg: Leg) -> None:
        raise AssertionError("no worker here has failed others")

    def failed(self, leg: Leg, failure: Failure, retried: bool) -> None:
        self.failures.append(failure.reason)

    def labelled(self, response: Response) -> Response:
        return response

    def finished(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    # -- what a test asks and does

    def send(self) -> None:
        """To the worker, at last."""
        decision = Decision(named("a"), Choice(0, None, "the only one"), PROMPT, 0, 0)
        self.routed(Leg(self.worker, decision, self.scheduler.reserve(decision, self.now), b""))

    def routed(self, answer: Leg | Response) -> None:
        assert self.waiting
        routed, self.waiting = self.waiting, None
        routed(answer)

    def answer(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.at_worker.data_received(piece)

    @property
    def is_waiting(self) -> bool:
        return self.waiting is not None

    @property
    def load(self) -> Load:
        return self.scheduler.book.load(rank("a"), 0.0)

    @property
    def generated(self) -> int:
        """Tokens booked beyond the prompt's."""
        return self.load.active_tokens - PROMPT

    @property
    def body(self) -> bytes:
        return self.client.written.partition(b"\r\n\r\n")[2]


def _unrecorded() -> Migration:
    """Of a request that is sent to an engine which tells no tokens, say."""
    inference = parse_inference("completions", b'{"prompt":"x","stream":true}')
    return Migration(Migrations(1, Fleet([]), lambda _: None), inference)


def test_a_request_is_booked_from_its_start_to_its_end() -> None:
    relayed = Relayed()
    assert relayed.load == Load(1, PROMPT, PROMPT)
    relayed.answer(EVENTS)
    assert relayed.load == Load(1, PROMPT, PROMPT)
    relayed.answer(EVENT)
    assert relayed.load == Load(1, 0, PROMPT + 1)
    relayed.answer(EVENT, LAST)
    assert relayed.load == Load()
    assert relayed.body == EVENT + EVENT + LAST
    assert [(outcome.status, outcome.end) for outcome in relayed.outcomes] == [(200, "complete")]


def test_times_count_from_when_the_request_came() -> None:
    relayed = Relayed()
    relayed.now += 2.0
    relayed.answer(EVENTS, EVENT)
    relayed.now += 3.0
    relayed.answer(EVENT, LAST)
    assert [(outcome.first_byte, outcome.duration) for outcome in relayed.outcomes] == [(2.0, 5.0)]


def test_generated_tokens_are_booked_in_steps() -> None:
    relayed, booked = Relayed(), []
    relayed.answer(EVENTS)
    for _ in range(3 * BOOKED):
        relayed.answer(EVENT)
        booked.append(relayed.generated)
    assert sorted(set(booked)) == [1, BOOKED, 2 * BOOKED, 3 * BOOKED]
    assert BOOKED == 16


events = st.lists(st.sampled_from([b"data: x\n\n", b"data: y\r\n\r\n", b"data: z", b"z\n\n"]), max_size=60)
cuts = st.lists(st.integers(0, 800), max_size=10)
kinds = st.sampled_from([EVENTS, EVENTS.replace(b"text/event-stream", b"application/json")])
versions = st.sampled_from([b"HTTP/1.1", b"HTTP/1.0"])


ends = st.sampled_from(["complete", "broken", "cancelled", "malformed"])


@given(events, cuts, st.booleans(), kinds, versions, ends, st.booleans())
def test_what_was_generated_is_booked_and_given_back_however_it_comes_and_ends(
    stream: list[bytes], where: list[int], one_by_one: bool, head: bytes, version: bytes, end: str, unrecorded: bool
) -> None:
    relayed = Relayed(b"POST /v1/x %s\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}" % version, unrecorded=unrecorded)
    relayed.answer(head)
    chunks = [chunk(content) for content in stream]
    begun = 0
    for piece in chunks if one_by_one else pieces_of(b"".join(chunks), where):
        relayed.answer(piece)
        body = relayed.at_worker._chunked
        begun = body.chunks if body else begun
        assert begun - BOOKED < relayed.generated <= begun
    match end:
        case "complete":
            relayed.answer(LAST)
        case "broken":
            relayed.at_worker.connection_lost(ConnectionResetError("reset"))
        case "cancelled":
            relayed.connection.connection_lost(None)
        case _:
            relayed.answer(b"zz\r\n")
    assert relayed.load == Load()
    assert len(relayed.outcomes) == 1
    if end != "cancelled":
        relayed.connection.connection_lost(None)
    relayed.at_worker.connection_lost(None)
    assert relayed.load == Load()
    assert len(relayed.outcomes) == 1
    if end == "complete" and version == b"HTTP/1.1":
        assert decode_chunks(relayed.body) == b"".join(stream)


@pytest.mark.parametrize("unrecorded", [False, True])
def test_an_event_in_two_chunks_is_not_overtaken_by_its_end(unrecorded: bool) -> None:
    relayed = Relayed(unrecorded=unrecorded)
    stream = [EVENT, EVENT, chunk(b'data: {"text":'), chunk(b'"x"}\n\n'), EVENT, LAST]
    relayed.answer(EVENTS, *stream)
    assert relayed.body == b"".join(stream)


def test_an_event_whose_empty_line_is_a_chunk_of_its_own_is_not_held_back() -> None:
    relayed = Relayed()
    event = [chunk(b"data: x\n"), chunk(b"\n")]
    relayed.answer(EVENTS, EVENT, EVENT, *event)
    assert relayed.body == EVENT + EVENT + b"".join(event)
    relayed.answer(EVENT, *event)
    assert relayed.body == EVENT + EVENT + b"".join([*event, EVENT, *event])


USAGE = chunk(b'data: {"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}\n\n')
DONE = chunk(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "pieces",
    [
        [EVENT + USAGE + DONE + LAST],
        [EVENT, USAGE + DONE + LAST],
        [EVENT, USAGE + DONE, LAST],
        [EVENT, USAGE, DONE + LAST],
        [EVENT, USAGE, DONE, LAST],
    ],
)
def test_a_streams_usage_is_found_however_its_end_comes(pieces: list[bytes]) -> None:
    relayed = Relayed()
    relayed.answer(EVENTS, *pieces)
    (outcome,) = relayed.outcomes
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (9, 8)


@pytest.mark.parametrize("missing", [LAST[at:] for at in range(len(LAST))])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("done", [DONE, chunk(b"data: [DONE]\r\n\r\n")])
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_a_stream_that_breaks_after_its_last_event_is_whole_in_whatever_pieces_it_came(
    missing: bytes, size: int, done: bytes, version: bytes
) -> None:
    """A client that has read [DONE] must not be told of an error."""
    relayed = Relayed(b"POST /v1/x %s\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}" % version)
    relayed.answer(EVENTS)
    relayed.answer(EVENT)
    rest = done + LAST.removesuffix(missing)
    for at in range(0, len(rest), size):
        relayed.answer(rest[at : at + size])
    relayed.at_worker.connection_lost(ConnectionResetError("reset"))
    chunks = EVENT + done + LAST
    assert relayed.body == (chunks if version == b"HTTP/1.1" else decode_chunks(chunks))
    assert [outcome.end for outcome in relayed.outcomes] == ["complete"]
    assert relayed.client.closed == (version == b"HTTP/1.0")


def test_half_a_last_event_is_not_the_end() -> None:
    relayed = Relayed()
    relayed.answer(EVENTS, EVENT, DONE[:-1])
    relayed.at_worker.connection_lost(ConnectionResetError("reset"))
    assert b"error" in relayed.body
    assert DONE not in relayed.body


FULL = chunk(b'data: {"error":{"object":"error","message":"The request queue is full.","code":503}}\n\n')


@pytest.mark.parametrize(
    ("status", "event", "learned"),
    [(b"200 OK", EVENT, True), (b"400 Bad Request", EVENT, False), (b"200 OK", FULL, False)],
)
def test_how_long_a_prompt_takes_is_learned_from_answers_alone(status: bytes, event: bytes, learned: bool) -> None:
    """An error comes at once, however long the prompt: the busiest worker would seem the quickest."""
    relayed = Relayed()
    relayed.answer(EVENTS.replace(b"200 OK", status), event, LAST)
    factors = prefill_factors(relayed.scheduler.latency, named("a"), 0.0)
    assert (factors[0] != 1.0) == learned
    assert relayed.load == Load()


@pytest.mark.parametrize("broken", ["_latest", "_steps"], ids=["the first token", "those after it"])
def test_a_fault_in_what_tokens_teach_costs_neither_the_answer_nor_the_release(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    relayed = Relayed()
    unfit(relayed.scheduler.latency, broken, rank("a"))
    relayed.answer(EVENTS, *[EVENT] * BOOKED, LAST)
    assert relayed.body == EVENT * BOOKED + LAST
    assert [outcome.end for outcome in relayed.outcomes] == ["complete"]
    assert relayed.load == Load()
    assert caplog.messages
    assert all("could not be learned from" in message for message in caplog.messages)


@pytest.mark.parametrize("size", [5, 1000])
def test_another_worker_is_tried_for_a_stream_that_begins_with_an_error_in_whatever_pieces_it_comes(size: int) -> None:
    relayed = Relayed(held=True, others=1)
    relayed.send()
    relayed.answer(EVENTS, *(FULL[at : at + size] for at in range(0, len(FULL), size)))
    assert relayed.is_waiting
    assert relayed.client.written == b""


def test_another_worker_is_tried_for_a_stream_that_breaks_in_its_first_event() -> None:
    relayed = Relayed(held=True, others=1)
    relayed.send()
    relayed.answer(EVENTS, EVENT[:-5])
    relayed.at_worker.connection_lost(ConnectionResetError("reset"))
    assert relayed.is_waiting
    assert relayed.client.written == b""


def test_who_answers_is_remembered_by_the_whole_first_event() -> None:
    seen: list[bytes] = []
    relayed = Relayed(on_first_bytes=lambda worker, first: seen.append(first))
    relayed.answer(EVENTS, EVENT[:5], EVENT[5:], EVENT)
    assert seen == [EVENT]
    assert relayed.body == EVENT + EVENT


def test_a_fault_in_remembering_who_answers_costs_neither_the_answer_nor_the_release(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(worker: Worker, first: bytes) -> None:
        raise KeyError(worker.id)

    relayed = Relayed(on_first_bytes=fail)
    relayed.answer(EVENTS, EVENT)
    assert relayed.load == Load(1, 0, PROMPT + 1), "the first token is learned from all the same"
    relayed.answer(LAST)
    assert relayed.body == EVENT + LAST
    assert [outcome.end for outcome in relayed.outcomes] == ["complete"]
    assert relayed.load == Load()
    assert caplog.messages == ["The worker of an answer could not be remembered"]


def test_the_next_request_of_a_client_starts_from_nothing() -> None:
    relayed = Relayed()
    relayed.answer(EVENTS, USAGE, LAST)
    relayed.connection.data_received(b"POST /v1/x HTTP/1.1\r\nhost: r\r\ncontent-length: 4\r\n\r\n{  }")
    assert relayed.load == Load(1, PROMPT, PROMPT)
    relayed.answer(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"ok")
    assert relayed.load == Load()
    first, second = relayed.outcomes
    assert (first.cached_tokens, second.cached_tokens) == (8, None)
    assert re.findall(rb"content-length: (\d+)", relayed.upstream.written) == [b"2", b"4"]
    assert relayed.client.written.endswith(b"content-length: 2\r\n\r\nok")
    assert relayed.at_worker.requests == 2


# -- held in the router


def test_a_held_request_reaches_its_worker_when_it_is_sent() -> None:
    relayed = Relayed(held=True)
    assert (relayed.load, relayed.upstream.written) == (Load(), b"")
    relayed.send()
    assert relayed.load == Load(1, PROMPT, PROMPT)
    assert relayed.upstream.written.startswith(b"POST /v1/x HTTP/1.1\r\n")
    relayed.answer(EVENTS, EVENT, LAST)
    assert (relayed.load, relayed.body) == (Load(), EVENT + LAST)
    assert [(outcome.status, outcome.end) for outcome in relayed.outcomes] == [(200, "complete")]
    assert relayed.withdrawn == 0


def test_a_client_that_leaves_while_its_request_is_held_is_withdrawn() -> None:
    relayed = Relayed(held=True)
    relayed.connection.connection_lost(None)
    assert (relayed.withdrawn, relayed.is_waiting, relayed.load) == (1, False, Load())
    assert relayed.upstream.written == b""
    assert [(outcome.leg, outcome.status, outcome.end) for outcome in relayed.outcomes] == [(None, 499, "cancelled")]


def test_a_held_request_that_is_refused_is_answered_and_its_connection_goes_on() -> None:
    relayed = Relayed(held=True)
    relayed.routed(error_response(429, "Too busy."))
    assert relayed.client.written.startswith(b"HTTP/1.1 429 ")
    assert [(outcome.leg, outcome.status, outcome.end) for outcome in relayed.outcomes] == [(None, 429, "failed")]
    relayed.connection.data_received(b"POST /v1/x HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}")
    relayed.send()
    relayed.answer(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"ok")
    assert relayed.client.written.endswith(b"ok")
    assert relayed.load == Load()


@pytest.mark.parametrize("end", ["sent", "refused", "left"])
def test_a_retry_may_be_held_too(end: str) -> None:
    relayed = Relayed(others=1)
    relayed.held = True
    relayed.answer(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
    assert relayed.failures == ["answered 503"]
    assert relayed.load == Load(), "what the first had booked is given back while it waits"
    assert relayed.is_waiting
    match end:
        case "sent":
            relayed.connect()
            relayed.send()
            assert relayed.load == Load(1, PROMPT, PROMPT)
            relayed.connection.connection_lost(None)
        case "refused":
            relayed.routed(error_response(429, "Too busy."))
            assert relayed.client.written.startswith(b"HTTP/1.1 429 ")
        case _:
            relayed.connection.connection_lost(None)
    assert not relayed.is_waiting
    assert relayed.load == Load()
    assert [outcome.status for outcome in relayed.outcomes] == [429 if end == "refused" else 499]


def test_a_client_that_takes_no_more_of_a_whole_answer_stops_no_later_one() -> None:
    """To HTTP/1.0 it goes in one piece when it is whole, and its connection is in the pool by then."""
    relayed = Relayed(b"POST /v1/x HTTP/1.0\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}")
    write = relayed.client.write

    def take_no_more(data: bytes | bytearray | memoryview[int]) -> None:
        write(data)
        relayed.connection.pause_writing()

    relayed.client.write = take_no_more  # type: ignore[method-assign]  # a fake's
    relayed.answer(EVENTS, EVENT, LAST)
    assert [outcome.end for outcome in relayed.outcomes] == ["complete"]
    assert relayed.worker.pool.take_idle() is relayed.at_worker
    assert not relayed.at_worker.paused


def test_a_worker_owes_nothing_while_its_client_does_not_read() -> None:
    """Once the client reads again, the worker has its time from then: what it sent meanwhile is yet to be read."""
    relayed = Relayed()
    relayed.answer(EVENTS, EVENT)
    (exchange,) = relayed.under_way
    silence = exchange.silence(1000.0)
    assert silence
    assert (silence.since, silence.owed) == (1000.0, "rest")
    relayed.connection.pause_writing()
    assert exchange.silence(1100.0) is None
    relayed.connection.resume_writing()
    silence = exchange.silence(1101.0)
    assert silence
    assert silence.since == 1100.0


def test_a_connection_that_breaks_long_after_the_request_was_sent_was_not_too_old() -> None:
    relayed = Relayed()
    relayed.answer(EVENTS, EVENT, LAST)
    relayed.connection.data_received(b"POST /v1/x HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}")
    relayed.now += STALE_WITHIN + 0.1
    relayed.at_worker.connection_lost(None)
    assert relayed.failures == ["broke off before its first byte: the connection was closed"]
    assert relayed.load == Load()


@pytest.mark.parametrize("heard", [b"HTTP/1.1 200 OK\r\ncont", b"HTTP/1.1 100 Continue\r\n\r\n", b"no HTTP\r\n\r\n"])
def test_a_connection_that_breaks_in_the_midst_of_a_head_was_not_too_old(heard: bytes) -> None:
    """The worker has the request: it is not sent to it once more as if it had not."""
    relayed = Relayed()
    relayed.answer(EVENTS, EVENT, LAST)
    relayed.connection.data_received(b"POST /v1/x HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}")
    relayed.answer(heard)
    relayed.at_worker.connection_lost(None)
    (failure,) = relayed.failures
    assert failure.startswith("broke off before its first byte: ")
    assert relayed.load == Load()
