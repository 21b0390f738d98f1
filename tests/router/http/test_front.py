"""The client's connection, driven byte by byte through a transport that only remembers."""

import asyncio
import re
import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.clients import Clients, Limits
from router.http.front import MAX_PIPELINED, Connection
from router.http.messages import Request, Response
from router.http.reader import MAX_HEAD, PIECES
from router.openai.errors import error_response
from tests.router.http.test_chunked import chunk, pieces_of


class FakeTransport(asyncio.Transport):
    def __init__(self, sock: socket.socket | None = None) -> None:
        super().__init__({"socket": sock})
        self.written = b""
        self.closed = self.aborted = self.eof = False
        self.reading = True
        self.unsent = self.closings = 0
        self.half_closes = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True
        self.closings += 1

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return self.half_closes

    def write_eof(self) -> None:
        assert self.half_closes
        self.eof = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    @property
    def status(self) -> int:
        return int(self.written.split()[1]) if self.written else 0


class Waiting:
    """An exchange that answers when it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def cancel(self) -> None:
        self.calls.append("cancel")

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


class Site:
    """Answers every request with its number and path, at once or (slow) when asked to."""

    def __init__(
        self,
        slow: bool = False,
        max_body: int = 1000,
        clients: Clients[Connection] | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.exchange = Waiting()
        self.slow = slow
        self.transport = FakeTransport(sock)
        self.later: list[Callable[[], None]] = []
        self.delays: set[float] = set()
        self.clients = clients or Clients(Limits(max_body))
        self.connection = Connection(self.serve, error_response, self.clients, self.call_later)
        self.connection.connection_made(self.transport)

    def serve(self, request: Request, connection: Connection) -> Waiting | None:
        self.requests.append(request)
        if self.slow:
            return self.exchange
        connection.respond(Response(200, b"%d" % len(self.requests)))
        return None

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.later.append(call)
        self.delays.add(seconds)

    def feed(self, data: bytes) -> None:
        self.connection.data_received(data)

    def turn(self) -> int:
        """What was put off is done. Returns how many requests were begun thereby."""
        before, calls, self.later = len(self.requests), self.later, []
        for call in calls:
            call()
        return len(self.requests) - before


GET = b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"hel") + chunk(b"lo") + b"0\r\n\r\n"
)


@given(st.lists(st.sampled_from([GET, POST, CHUNKED]), max_size=5), st.lists(st.integers(0, 500), max_size=12))
def test_requests_are_the_same_however_they_are_cut(requests: list[bytes], cuts: list[int]) -> None:
    site = Site()
    for piece in pieces_of(b"".join(requests), cuts):
        site.feed(piece)
    expected = {GET: (b"GET", b"/a?b", b""), POST: (b"POST", b"/p", b"hello"), CHUNKED: (b"POST", b"/c", b"hello")}
    assert [(r.head.method, r.head.target, r.body) for r in site.requests] == [expected[r] for r in requests]
    assert site.transport.written.count(b"HTTP/1.1 200 OK\r\n") == len(requests)
    assert not site.transport.closed


@given(st.binary(max_size=200), st.sampled_from([b"", GET[:20], POST[:-1], CHUNKED[:70]]))
def test_nothing_that_comes_in_raises(garbage: bytes, start: bytes) -> None:
    site = Site()
    for i in range(len(garbage)):
        site.feed((start if i == 0 else b"") + garbage[i : i + 1])
    assert site.transport.status in {0, 200, 400, 413, 501}


def request(*headers: bytes, body: bytes = b"", method: bytes = b"POST") -> bytes:
    return method + b" /v1/x HTTP/1.1\r\n" + b"\r\n".join((b"host: x", *headers)) + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (request(b"content-length: 5", b"content-length: 6", body=b"hello"), 400),
        (request(b"content-length: 5", b"transfer-encoding: chunked", body=b"0\r\n\r\n"), 400),
        (request(b"content-length: +5", body=b"hello"), 400),
        (request(b"content-length: 99999999999999999999999"), 400),
        (request(b"transfer-encoding: chunked", body=b"xyz\r\n"), 400),
        (request(b"transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"), 501),
        (request(b"content-encoding: gzip", b"content-length: 5", body=b"hello"), 415),
        (request(b"content-encoding: utf-8, gzip", b"content-length: 5", body=b"hello"), 415),
        (request(b"content-encoding: utf-8", b"content-encoding: br", b"content-length: 5", body=b"hello"), 415),
        (request(b"name : value"), 400),
        (request(b"content-length: 1001"), 413),
        (request(b"transfer-encoding: chunked", body=chunk(b"x" * 600) + chunk(b"x" * 600)), 413),
        (request(b"a: " + b"x" * MAX_HEAD), 431),
        (b"GET /" + b"x" * MAX_HEAD, 431),
        (request(*[b"a%d: b" % i for i in range(10_000)]), 431),
    ],
)
def test_what_cannot_be_read_is_refused_and_the_connection_ends(message: bytes, status: int) -> None:
    site = Site()
    site.feed(message)
    assert site.requests == []
    assert site.transport.status == status
    assert b'"error"' in site.transport.written
    assert b"connection: close" in site.transport.written
    assert site.transport.eof
    site.feed(GET)
    assert site.requests == []
    assert not site.transport.closed  # what the client still sends must not reset the answer away
    site.later[0]()
    assert site.transport.closed


def test_what_cannot_be_read_is_refused_where_no_direction_ends_alone() -> None:
    """As over TLS."""
    site = Site()
    site.transport.half_closes = False
    site.feed(b"nonsense\r\n\r\n")
    assert (site.transport.status, site.transport.closed) == (400, False)
    site.later[0]()
    assert site.transport.closed


@pytest.mark.parametrize("coding", [b"identity", b"Identity, identity", b"", b"utf-8", b"UTF8"])
def test_a_content_encoding_that_compresses_nothing_is_passed_over(coding: bytes) -> None:
    """Some clients state a charset there, or nothing, and engines do not look at it."""
    site = Site()
    site.feed(request(b"content-encoding: " + coding, b"content-length: 5", body=b"hello"))
    assert [request.body for request in site.requests] == [b"hello"]
    assert site.requests[0].head.passed_on == b""


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        (b"http://router/v1/x?y=/z", b"/v1/x?y=/z"),
        (b"HTTPS://[::1]:8443/v1/x", b"/v1/x"),
        (b"http://router", b"/"),
        (b"http://router?y", b"/?y"),
        (b"http:///v1/x", b"http:///v1/x"),
        (b"ftp://router/v1/x", b"ftp://router/v1/x"),
        (b"*", b"*"),
        (b"/http://router/v1/x", b"/http://router/v1/x"),
    ],
)
def test_a_target_may_name_the_host(target: bytes, origin: bytes) -> None:
    """As clients of a proxy write it: RFC 9112 section 3.2.2."""
    site = Site()
    for _ in range(2):  # the second is recognised
        site.feed(POST.replace(b"/p", target))
    assert [(request.head.target, request.body) for request in site.requests] == [(origin, b"hello")] * 2
    assert {request.head.path for request in site.requests} == {origin.partition(b"?")[0]}


def test_a_target_that_names_the_host_is_admitted_by_its_path() -> None:
    admitted: list[bytes] = []
    site = Site()
    connection = Connection(
        site.serve, error_response, site.clients, site.call_later, admit=lambda target, _: admitted.append(target)
    )
    connection.connection_made(site.transport)
    connection.data_received(POST.replace(b"/p", b"http://router/p"))
    assert admitted == [b"/p"]


def test_a_head_that_never_ends_is_refused() -> None:
    site = Site()
    site.feed(b"GET / HTTP/1.1\r\n")
    for _ in range(MAX_HEAD // 1000 + 1):
        site.feed(b"x" * 990 + b": y\r\n")
    assert site.transport.status == 431
    assert b"The request's head is larger than" in site.transport.written


@pytest.mark.parametrize("begun", [b"", chunk(b"hello")])
@pytest.mark.parametrize("line", [b"0\r\nx-t: ", b"1;a="], ids=["trailer", "extension"])
def test_what_is_no_content_does_not_go_on_for_ever_either(begun: bytes, line: bytes) -> None:
    """The parser would gather all of a trailer, and copy it with each piece."""
    site = Site()
    site.feed(request(b"transfer-encoding: chunked") + begun + line)
    for _ in range(MAX_HEAD // 1000 + 1):
        assert not site.transport.written
        site.feed(b"x" * 1000)
    assert site.transport.status == 431
    assert b"The request's trailer is larger than" in site.transport.written
    assert site.connection.closing


def test_a_body_in_small_chunks_may_have_any_number_of_them() -> None:
    """Though their sizes are more than a head may be, and each comes alone."""
    site = Site(max_body=MAX_HEAD)
    site.feed(request(b"transfer-encoding: chunked"))
    for _ in range(MAX_HEAD // 3):
        site.feed(b"1\r\n")
        site.feed(b"x\r\n")
    site.feed(b"0\r\n\r\n")
    assert len(site.requests[0].body) == MAX_HEAD // 3


def test_a_body_in_tiny_chunks_is_not_kept_in_as_many_pieces() -> None:
    """Each would take twenty times its bytes, of which only these are counted."""
    site = Site(max_body=100_000)
    site.feed(request(b"transfer-encoding: chunked"))
    for _ in range(50):
        site.feed(chunk(b"ab") * 1000)
        assert len(site.connection._reader._body) <= PIECES + 100_000 // 256
    site.feed(b"0\r\n\r\n")
    assert site.requests[0].body == b"ab" * 50_000


def test_neither_is_one_that_comes_bit_by_bit_behind_a_repeated_head() -> None:
    site = Site(max_body=100_000)
    site.feed(request(b"content-length: 2", body=b"ab"))
    site.feed(request(b"content-length: 100000"))
    for _ in range(50_000):
        site.feed(b"ab")
        assert len(site.connection._reader._body) <= PIECES + 100_000 // 256
    assert site.requests[1].body == b"ab" * 50_000


def test_pipelined_requests_are_answered_in_order_and_not_read_without_end() -> None:
    site = Site(slow=True)
    site.feed(GET * MAX_PIPELINED)
    assert site.transport.reading
    site.feed(GET)
    assert len(site.requests) == 1
    assert not site.transport.reading
    site.connection.respond(Response(200, b"1"))
    assert len(site.requests) == 2
    assert site.transport.reading


def test_a_refusal_is_not_taken_for_the_answer_to_a_request_that_waits() -> None:
    """A slow client's next request waits until it has taken the answer before; the one behind it cannot be read."""
    site = Site()
    site.feed(GET)
    answered = site.transport.written
    site.connection.pause_writing()
    site.feed(GET + b"nonsense\r\n\r\n")
    assert (len(site.requests), site.transport.written) == (1, answered)
    site.connection.resume_writing()
    assert len(site.requests) == 2
    assert site.transport.written[len(answered) :].count(b"HTTP/1.1 ") == 2
    assert site.transport.written.index(b" 400 ") > site.transport.written.rindex(b" 200 ")
    assert (site.transport.eof, site.transport.reading) == (True, True)


def test_a_refusal_comes_after_answers_that_take_their_time() -> None:
    site = Site()
    site.feed(GET)
    site.connection.pause_writing()
    site.slow = True
    site.feed(GET * 2 + b"nonsense\r\n\r\n")
    site.connection.resume_writing()
    for number in (2, 3):
        assert (len(site.requests), b" 400 " in site.transport.written) == (number, False)
        site.connection.respond(Response(200, b"%d" % number))
    assert b" 400 " in site.transport.written
    assert site.transport.eof


def test_the_next_request_waits_until_the_client_has_taken_the_answers_before() -> None:
    """Else they would pile up."""
    site = Site(slow=True)
    site.feed(GET * 2)
    site.connection.pause_writing()
    site.connection.respond(Response(200, b"1"))
    assert len(site.requests) == 1
    site.connection.resume_writing()
    assert len(site.requests) == 2


def test_thousands_of_small_requests_in_one_read_are_answered_one_after_the_other() -> None:
    """Each answer that is there at once begins the next request: within each other they would be too deep."""
    site = Site(slow=True)
    site.feed(GET * 3000)
    site.slow = False
    site.connection.respond(Response(200, b"1"))
    while site.turn():
        pass
    assert len(site.requests) == 3000
    assert site.transport.written.endswith(b"\r\n\r\n3000")
    assert site.transport.reading


def test_others_have_their_turn_between_requests_that_are_answered_at_once() -> None:
    """There may be megabytes of them."""
    site = Site()
    site.feed(GET * (2 * MAX_PIPELINED + 1))
    assert (len(site.requests), site.transport.reading) == (MAX_PIPELINED, False)
    assert (site.turn(), site.transport.reading) == (MAX_PIPELINED, False)
    assert (site.turn(), site.transport.reading) == (1, True)
    for _ in range(3):  # what comes one after the other waits for nothing
        site.feed(GET * (MAX_PIPELINED - 1))
    assert (site.turn(), site.transport.reading, len(site.requests)) == (0, True, 5 * MAX_PIPELINED - 2)
    assert site.delays == {0}


def test_others_have_their_turn_while_thousands_of_small_requests_are_read() -> None:
    """The event loop hands over a quarter of a megabyte at a time."""
    site, many = Site(), 7000
    site.feed(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(many)))
    site.feed(b"GET /last HTTP/1.1\r\nhost: x\r\n\r\n")
    assert len(site.connection._waiting) < 1000
    while not site.transport.reading:
        site.turn()
        assert len(site.connection._waiting) < 1000
    assert [request.head.path for request in site.requests] == [*(b"/%d" % number for number in range(many)), b"/last"]
    assert site.delays == {0}


def test_others_have_their_turn_while_a_body_in_tiny_chunks_is_read() -> None:
    site, turns = Site(max_body=100_000), 0
    site.feed(request(b"transfer-encoding: chunked") + chunk(b"a") * 40_000 + b"0\r\n\r\n" + GET)
    while not site.transport.reading:
        site.turn()
        turns += 1
    assert [request.body for request in site.requests] == [b"a" * 40_000, b""]
    assert turns > 10


def test_what_is_not_read_yet_is_forgotten_with_the_connection() -> None:
    site = Site()
    site.feed(GET * 7000)
    assert site.connection._reader.unread
    site.connection.drain()
    assert not site.connection._reader.unread
    while site.later:
        site.turn()
    assert (len(site.requests), site.transport.closings) == (MAX_PIPELINED, 1)


def test_what_cannot_be_read_is_refused_behind_thousands_that_can() -> None:
    site = Site()
    site.feed(GET * 3000 + b"nonsense\r\n\r\n" + GET * 3000)
    while not site.transport.eof:
        site.turn()
    assert len(site.requests) == 3000
    assert site.transport.written.index(b" 400 ") > site.transport.written.rindex(b" 200 ")
    assert (site.transport.reading, site.connection._reader.unread) == (True, b"")


def test_a_refusal_is_sent_and_what_is_refused_is_taken_though_others_have_their_turn() -> None:
    site = Site()
    site.feed(GET * MAX_PIPELINED + b"nonsense\r\n\r\n")
    assert b" 400 " in site.transport.written
    site.later[0]()
    assert (site.transport.reading, site.transport.closed) == (True, False)


def test_a_refusal_comes_after_the_answers_to_those_that_others_have_their_turn_before() -> None:
    site = Site()
    site.feed(GET * (2 * MAX_PIPELINED + 1) + b"nonsense\r\n\r\n" + GET)
    assert b" 400 " not in site.transport.written
    site.feed(GET)  # behind what could not be read nothing counts
    while not site.transport.eof:
        site.turn()
    assert len(site.requests) == 2 * MAX_PIPELINED + 1
    assert site.transport.written.index(b" 400 ") > site.transport.written.rindex(b" 200 ")
    assert (site.transport.reading, site.connection.closing) == (True, True)


def test_nothing_begins_on_a_connection_that_was_lost_meanwhile() -> None:
    site = Site()
    site.feed(GET * (MAX_PIPELINED + 1))
    site.transport.abort()
    site.connection.connection_lost(None)
    assert (site.turn(), site.transport.reading) == (0, False)


def test_nothing_begins_on_a_connection_that_was_cut_off_meanwhile() -> None:
    site = Site()
    site.feed(GET * (MAX_PIPELINED + 1))
    site.connection.abort()
    assert (site.turn(), site.transport.reading) == (0, False)


@pytest.mark.parametrize("answered", [False, True])
def test_only_an_answer_that_is_cut_off_ends_in_a_reset(answered: bool) -> None:
    """A reset takes from the client what it has not read yet of the answer before."""
    with socket.socket() as sock:
        site = Site(slow=not answered, sock=sock)
        site.feed(GET)
        site.connection.abort()
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER) == (0 if answered else 1)


def test_nothing_begins_behind_an_answer_that_ends_the_connection() -> None:
    """Such as a stream for HTTP/1.0, which the client may take slowly."""
    site = Site(slow=True)
    site.feed(GET * 2)
    site.connection.pause_writing()
    site.connection.finish(keep_alive=False)
    site.connection.resume_writing()
    assert (len(site.requests), site.transport.closed) == (1, True)


def test_a_lost_connection_cancels_what_is_in_progress() -> None:
    site = Site(slow=True)
    site.feed(GET)
    assert site.clients.open
    site.connection.connection_lost(None)
    assert site.exchange.calls == ["cancel"]
    assert not site.clients.open


def test_a_slow_reader_pauses_its_exchange() -> None:
    site = Site(slow=True)
    site.feed(GET)
    site.connection.pause_writing()
    site.connection.resume_writing()
    assert site.exchange.calls == ["pause", "resume"]


@pytest.mark.parametrize(
    ("message", "stays", "told"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", True, []),
        (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", False, [b"close"]),
        (b"GET / HTTP/1.0\r\n\r\n", False, [b"close"]),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", True, [b"keep-alive"]),
    ],
)
def test_keep_alive(message: bytes, stays: bool, told: list[bytes]) -> None:
    site = Site()
    site.feed(message)
    assert site.transport.status == 200
    assert re.findall(rb"connection: (.*)\r\n", site.transport.written) == told
    assert site.transport.closed is not stays


@pytest.mark.parametrize(
    ("headers", "drained", "told"), [([], False, False), ([b"connection: close"], False, True), ([], True, True)]
)
def test_an_answer_that_begins_says_whether_the_connection_ends_with_it(
    headers: list[bytes], drained: bool, told: bool
) -> None:
    site = Site(slow=True)
    site.feed(request(*headers))
    if drained:
        site.connection.drain()
    site.connection.begin(Response(200))
    assert (b"connection: " in site.transport.written) == told
    assert (b"connection: close\r\n" in site.transport.written) == told
    site.connection.finish(site.requests[0].head.keep_alive)
    assert site.transport.closed == told


def test_head_has_the_length_but_no_body() -> None:
    site = Site()
    site.feed(request(method=b"HEAD"))
    assert b"content-length: 1\r\n" in site.transport.written
    assert site.transport.written.endswith(b"\r\n\r\n")


def test_who_waits_to_send_a_body_is_told_to_go_on_after_the_answers_before() -> None:
    """Told at once, the client would take it for a word on the request before; told never, it might wait for ever."""
    site = Site(slow=True)
    site.feed(GET + request(b"content-length: 5", b"expect: 100-continue"))
    assert site.transport.written == b""
    site.connection.respond(Response(200, b"ok"))
    assert site.transport.written.endswith(b"okHTTP/1.1 100 Continue\r\n\r\n")
    site.feed(b"hello")
    assert [each.body for each in site.requests] == [b"", b"hello"]
    assert site.transport.written.count(b" 100 ") == 1


def test_nor_is_it_told_before_the_answer_to_a_request_that_waits() -> None:
    site = Site()
    site.feed(GET)
    site.connection.pause_writing()
    site.feed(GET + request(b"content-length: 5", b"expect: 100-continue"))
    assert b" 100 " not in site.transport.written
    site.connection.resume_writing()
    assert site.transport.written.endswith(b"2HTTP/1.1 100 Continue\r\n\r\n")


def test_who_has_sent_it_meanwhile_is_not_told() -> None:
    site = Site(slow=True)
    site.feed(GET + request(b"content-length: 5", b"expect: 100-continue", body=b"hello"))
    for _ in range(2):
        site.connection.respond(Response(200, b"ok"))
    assert b" 100 " not in site.transport.written


@pytest.mark.parametrize("behind", [request(b"content-length: 5", b"expect: 100-continue"), b"nonsense\r\n\r\n"])
def test_nothing_is_said_behind_the_last_answer(behind: bytes) -> None:
    site = Site()
    site.feed(POST[:-1])
    site.connection.drain()
    site.feed(POST[-1:] + behind)
    assert site.transport.closed
    assert site.transport.written.count(b"HTTP/1.1 ") == 1


def test_expect_continue_is_answered_before_the_body() -> None:
    site = Site()
    site.feed(request(b"content-length: 5", b"expect: 100-continue"))
    assert site.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    site.feed(b"hello")
    assert site.requests[0].body == b"hello"


def test_an_old_client_is_told_of_no_interim_answer() -> None:
    """It would take that for the answer (RFC 9110 section 10.1.1)."""
    site = Site()
    site.feed(b"POST /v1/x HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
    assert site.transport.written == b""
    site.feed(b"hello")
    assert site.transport.status == 200


@pytest.mark.parametrize("order", [1, -1])
def test_expect_continue_of_a_body_too_large_is_refused(order: int) -> None:
    """A client that was told to go on first would send all of it."""
    site = Site()
    site.feed(request(*[b"content-length: 5000", b"expect: 100-continue"][::order]))
    assert site.transport.status == 413


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_an_offer_to_upgrade_is_declined_by_answering(upgrade: bytes) -> None:
    site = Site()
    site.feed(request(b"connection: upgrade", b"upgrade: " + upgrade, method=b"GET") + GET)
    assert [r.head.target for r in site.requests] == [b"/v1/x", b"/a?b"]


def test_thousands_of_offers_to_upgrade_in_one_read_are_declined_one_after_the_other() -> None:
    """Within each other they would be too deep."""
    site = Site()
    site.feed(request(b"connection: upgrade", b"upgrade: h2c", method=b"GET") * 3000)
    while site.turn():
        pass
    assert len(site.requests) == 3000
    assert site.transport.written.endswith(b"\r\n\r\n3000")


@pytest.mark.parametrize("framing", [b"content-length: 10", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("cuts", [[], [20], [70, 100], list(range(300))])
def test_the_body_behind_an_offer_to_upgrade_is_no_request(framing: bytes, cuts: list[int]) -> None:
    """The parser itself ends such a message with its head, and would take the body for the next one."""
    smuggled = b"GET / HTTP"
    body = chunk(smuggled) + b"0\r\n\r\n" if framing.startswith(b"transfer") else smuggled
    offer = request(b"connection: upgrade", b"expect: 100-continue", b"upgrade: h2c", framing, body=body)
    site = Site()
    for piece in pieces_of(offer + offer + POST, cuts):
        site.feed(piece)
    assert [r.body for r in site.requests] == [smuggled, smuggled, b"hello"]
    assert site.transport.written.count(b"100 Continue") == 2


def test_draining_ends_idle_connections_at_once_and_busy_ones_after_their_answer() -> None:
    idle, busy = Site(), Site(slow=True)
    busy.feed(GET)
    for site in (idle, busy):
        site.connection.drain()
    assert idle.transport.closed
    assert not busy.transport.closed
    assert busy.connection.busy
    busy.connection.respond(Response(200, b"done"))
    assert b"connection: close" in busy.transport.written
    assert busy.transport.closed


@pytest.mark.parametrize("before", [b"", POST, CHUNKED])
@pytest.mark.parametrize("cut", [1, 40, len(POST) - 1])
def test_draining_waits_for_a_request_that_has_begun_to_come(before: bytes, cut: int) -> None:
    site = Site()
    site.feed(before)
    site.feed(POST[:cut])
    site.connection.drain()
    assert not site.transport.closed
    assert site.connection.busy
    site.feed(POST[cut:] + POST)
    assert site.requests[-1].body == b"hello"
    assert site.transport.written.endswith(b"connection: close\r\n\r\n%d" % len(site.requests))
    assert len(site.requests) == 1 + bool(before)
    assert site.transport.closed
    assert not site.connection.busy


def test_draining_waits_for_it_while_others_have_their_turn_too() -> None:
    site = Site()
    site.feed(GET * MAX_PIPELINED + POST[:-1])
    site.connection.drain()
    assert not site.transport.closed
    site.turn()
    site.feed(POST[-1:])
    assert (len(site.requests), site.requests[-1].body) == (MAX_PIPELINED + 1, b"hello")
    assert site.transport.closed


@pytest.mark.parametrize("read", [GET[:10], POST[:40], POST[:-1], CHUNKED[:-1]], ids=["line", "head", "body", "chunks"])
def test_draining_again_refuses_it(read: bytes) -> None:
    site = Site()
    site.feed(read)
    site.connection.drain()
    site.connection.drain()
    assert site.transport.written.startswith(b"HTTP/1.1 503 ")
    assert b"--drain-timeout" in site.transport.written
    assert not site.connection.busy
    site.feed(POST)
    assert (site.requests, site.transport.written.count(b"HTTP/1.1")) == ([], 1)


def test_an_answer_that_is_not_sent_out_yet_is_waited_for() -> None:
    site = Site()
    assert not site.connection.busy
    site.feed(GET)
    site.transport.unsent = 1
    site.connection.drain()
    assert site.connection.busy
    site.transport.unsent = 0
    assert not site.connection.busy


def test_what_was_closed_is_not_closed_again() -> None:
    """asyncio's transports over TLS lose what tells whether anything is unsent."""
    site = Site()
    site.feed(request(b"connection: close"))
    assert site.transport.closings == 1
    site.connection.drain()
    site.connection.drain()
    assert site.transport.closings == 1
