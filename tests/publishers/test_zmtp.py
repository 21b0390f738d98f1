"""ZMTP without sockets; that libzmq understands it, and is understood, the tests of `zmq_source` show."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publishers.zmtp import GREETING, Kind, Peer, Violation, message, subscription
from tests.router.http.test_chunked import pieces_of

LIMIT = 1000
GREETING_31 = GREETING[:10] + b"\x03\x01" + GREETING[12:]
"""Of libzmq since 4.3."""
FRAMES = st.lists(st.binary(max_size=400), min_size=1, max_size=4).filter(lambda frames: sum(map(len, frames)) <= LIMIT)


def command(content: bytes) -> bytes:
    return bytes((4, len(content))) + content


def ready(kind: bytes, *properties: bytes) -> bytes:
    return command(b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind + b"".join(properties))


HELLO = GREETING_31 + ready(b"PUB")


def peer(kind: Kind = "SUB") -> Peer:
    return Peer(kind, LIMIT)


def agreed(kind: Kind = "SUB", theirs: bytes = b"XPUB") -> Peer:
    made = peer(kind)
    made.feed(GREETING_31 + ready(theirs))
    assert made.ready
    made.answers.clear()
    return made


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 4000), max_size=12))
def test_messages_are_the_same_however_they_are_cut(messages: list[list[bytes]], cuts: list[int]) -> None:
    one = peer()
    stream = HELLO + b"".join(map(message, messages))
    assert [found for piece in pieces_of(stream, cuts) for found in one.feed(piece)] == messages


def test_it_greets_at_once_and_says_what_it_is_when_it_is_greeted() -> None:
    one = peer("DEALER")
    assert one.answers == [GREETING]
    assert len(GREETING) == 64
    one.feed(GREETING_31)
    assert one.answers[1:] == [command(b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER")]
    assert not one.ready
    one.feed(ready(b"ROUTER", b"\x08Identity\0\0\0\0"))
    assert one.ready


def test_a_long_topic_makes_a_long_frame() -> None:
    assert subscription(b"kv@") == b"\0\x04\x01kv@"
    assert subscription(b"x" * 300)[:10] == b"\x02" + (301).to_bytes(8, "big") + b"\x01"


def test_whoever_asks_whether_somebody_is_there_is_answered() -> None:
    one = agreed()
    one.feed(command(b"\x04PING\x00\x0acontext"))
    assert one.answers == [command(b"\x04PONGcontext")]


def test_other_commands_mean_nothing_here() -> None:
    one = agreed()
    one.feed(command(b"\x04NONE") + command(b"") + command(b"\x04PING") + ready(b"PUB"))
    assert one.answers == []
    assert one.feed(message([b"a", b""])) == [[b"a", b""]]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", "does not speak ZMTP 3"),
        (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53), "does not speak ZMTP 3"),
        (GREETING_31.replace(b"NULL\0", b"CURVE"), "encryption or a password"),
        (GREETING_31 + ready(b"ROUTER"), "no PUB socket"),
        (GREETING_31 + command(b"\x05READY"), "no PUB socket"),
        (GREETING_31 + ready(b"PUB")[:-3] + b"PU\xff", "no PUB socket"),
        (GREETING_31 + command(b"\x05ERROR\x03why"), "refuses"),
        (GREETING_31 + message([b"x"]), "before it was ready"),
        (HELLO + b"\x08\0", "no known kind"),
        (HELLO + message([bytes(LIMIT + 1)])[:20], "more than 1000 bytes"),
        (HELLO + message([bytes(600), bytes(600)]), "more than 1000 bytes"),
        (HELLO + message([b""] * 65), "64 frames"),
        (HELLO + command(bytes(200)) + b"\x06" + (2**63).to_bytes(8, "big"), "more than 1000 bytes"),
    ],
)
def test_what_breaks_the_protocol(said: bytes, why: str) -> None:
    with pytest.raises(Violation, match=why):
        peer().feed(said)


@given(st.binary(max_size=200))
def test_nothing_else_is_raised(garbage: bytes) -> None:
    for before in (b"", GREETING_31, HELLO):
        with contextlib.suppress(Violation):
            peer().feed(before + garbage)
