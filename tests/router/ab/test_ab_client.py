from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ab.client import Address, Exchange, Outcome, read_usage, send
from router.security.worker_access import WorkerAccess

from .conftest import Serve
from .streams import DONE, HEAD, chunked, plain, token, usage

WHOLE = chunked(token(), token(), token(), usage(40, 16, 3), DONE)


async def feed(pieces: list[bytes], *, eof: bool = False) -> Outcome:
    """What an exchange makes of a response that arrives in these pieces."""
    exchange = Exchange(b"", 0.0, asyncio.get_running_loop().create_future())
    for piece in pieces:
        exchange.data_received(piece)
    if eof:
        exchange.connection_lost(None)
    assert exchange.done.done()
    return exchange.outcome


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(edges)]


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=20))
def test_any_fragmentation_gives_the_same_outcome(cuts: list[int]) -> None:
    outcome = asyncio.run(feed(split(WHOLE, cuts)))
    assert (outcome.error, outcome.status, outcome.worker) == ("", 200, "w1")
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (40, 16, 3)
    assert 0 < outcome.first <= outcome.last


async def test_byte_by_byte() -> None:
    outcome = await feed([WHOLE[i : i + 1] for i in range(len(WHOLE))])
    assert (outcome.error, outcome.output_tokens) == ("", 3)


async def test_who_computed_the_prompt() -> None:
    assert (await feed([WHOLE])).prefill_worker == ""
    parted = WHOLE.replace(b"X-Router-Worker: w1\r\n", b"X-Router-Worker: w1\r\nX-Router-Prefill-Worker: w2\r\n")
    outcome = await feed([parted])
    assert (outcome.worker, outcome.prefill_worker) == ("w1", "w2")


async def test_only_the_body_starts_the_clock() -> None:
    head, body = WHOLE.split(b"\r\n\r\n", 1)
    exchange = Exchange(b"", 0.0, asyncio.get_running_loop().create_future())
    exchange.data_received(head + b"\r\n\r\n")
    assert exchange.outcome.first == 0.0
    exchange.data_received(body)
    assert exchange.outcome.first > 0.0


async def test_a_long_stream_keeps_only_its_tail() -> None:
    outcome = await feed([chunked(*[token("x" * 100)] * 2000, usage(7, None, 2000), DONE)])
    assert (outcome.error, outcome.output_tokens, outcome.cached_tokens) == ("", 2000, 0)
    assert outcome.chunks == 2002


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (plain(b"503 Service Unavailable", b'{"error":\n "busy"}'), 'status 503: {"error": "busy"}'),
        (b"HTTP/1.0 503 Service Unavailable\r\n\r\nno worker", "status 503: no worker"),
        (chunked(token(), DONE), "the stream ended without usage"),
        (chunked(token(), b'data: {"error":{"message":"boom"}}\n\n', DONE), 'error in the stream: {"message":"boom"}'),
        (chunked(b'data: {"usage"\n\n'), "the last chunk of the stream is not JSON"),
        (chunked(b'data: {"usage":null,"x":%b' % (b"[" * 4000)), "the last chunk of the stream is not JSON"),
        (b"SSH-2.0-OpenSSH\r\n", "not an HTTP response"),
    ],
)
async def test_what_is_no_answer(response: bytes, error: str) -> None:
    outcome = await feed([response], eof=True)
    assert outcome.error.startswith(error)


async def test_an_early_close_is_an_error() -> None:
    outcome = await feed([WHOLE[:-200]], eof=True)
    assert outcome.error.startswith("connection closed after")


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    outcome = await feed([HEAD + b"\r\n" + token() + usage(5, 0, 1) + DONE], eof=True)
    assert (outcome.error, outcome.output_tokens) == ("", 1)


def test_no_text_of_an_answer_is_taken_for_usage() -> None:
    outcome = Outcome(0.0)
    tail = token('\\"usage\\"') + usage(9, 8, 1) + token('\\"error\\"') + DONE
    assert read_usage(tail, outcome) == ""
    assert outcome.cached_tokens == 8


async def test_over_a_socket(serve: Serve) -> None:
    seen: list[bytes] = []

    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        seen.extend((head, body))
        writer.write(WHOLE)
        await writer.drain()

    outcome = await send(await serve(answer), b'{"x":1}', timeout=10)
    assert outcome.error == ""
    assert outcome.sent <= outcome.first <= outcome.last
    assert seen[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert seen[1] == b'{"x":1}'


async def test_a_worker_that_never_answers(serve: Serve) -> None:
    async def silent(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n" + token())
        await writer.drain()
        await writer.wait_closed()

    outcome = await send(await serve(silent), b"{}", timeout=0.05)
    assert outcome.error == "no complete answer within 0.05 s"


async def test_a_worker_that_is_down(serve: Serve) -> None:
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()
    outcome = await send(address, b"{}", timeout=10)
    assert outcome.error.startswith(f"cannot connect to {address.url}: ")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000", Address("10.0.0.1", 8000)),
        ("http://host/some/path/", Address("host", 80, "/some/path")),
        ("http://[::1]:81", Address("::1", 81)),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.parse(url) == address


def test_an_ipv6_address_is_in_brackets() -> None:
    assert b"\r\nHost: [::1]:81\r\n" in Address("::1", 81).request(b"")


def test_an_address_by_tls() -> None:
    address = Address.parse("https://host/v0", WorkerAccess("k"))
    assert (address.port, address.url, bool(address.tls)) == (443, "https://host:443/v0", True)
    assert b"\r\nAuthorization: Bearer k\r\n" in address.request(b"")
