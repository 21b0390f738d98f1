"""Usage that waits for what a prefill worker tells."""

from __future__ import annotations

import asyncio

import pytest

from router.http.upstream import Head
from router.split.late_usage import LateUsage

EVENT = b'data: {"prompt_tokens_details":{"cached_tokens":7}}'


class Seen:
    def __init__(self) -> None:
        self.calls: list[str | bytes] = []

    def on_head(self, head: Head, length: int | None) -> None: ...

    def on_body(self, data: bytes, boundary: int) -> None:
        self.calls.append(data)

    def on_chunks(self, chunks: int) -> None: ...

    def on_end(self) -> None:
        self.calls.append("end")

    def on_broken(self, reason: str) -> None:
        self.calls.append(reason)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def late(seen: Seen) -> LateUsage:
    return LateUsage(seen, lambda: seen.calls.append("settled"))


@pytest.mark.parametrize("cut", range(1, len(EVENT)))
async def test_a_word_that_is_cut_is_found(seen: Seen, late: LateUsage, cut: int) -> None:
    late.on_body(EVENT[:cut], 0)
    late.on_body(EVENT[cut:], 0)
    late.on_end()
    early = EVENT[:cut]
    expected: list[str | bytes] = [early, "settled"] if b'"cached_tokens"' not in early else ["settled"]
    assert seen.calls == expected
    late.release()
    assert seen.calls[len(expected) :] == [*([] if early in expected else [early]), EVENT[cut:], "end"]


async def test_a_word_that_comes_byte_by_byte_is_found(seen: Seen, late: LateUsage) -> None:
    bytes_ = [bytes([byte]) for byte in EVENT]
    for each in bytes_:
        late.on_body(each, 0)
    late.on_end()
    assert seen.calls == [*bytes_[: EVENT.index(b'":7')], "settled"]


async def test_nothing_waits_that_does_not_tell_it(seen: Seen, late: LateUsage) -> None:
    late.on_body(b"data: 1", 0)
    late.on_end()
    assert seen.calls == [b"data: 1", "end"]


async def test_an_error_does_not_wait(seen: Seen, late: LateUsage) -> None:
    late.on_head(Head(400, "sized", events=False, keep_alive=True, passed_on=b""), 10)
    late.on_body(EVENT, 0)
    assert seen.calls == [EVENT]


async def test_an_answer_that_breaks_off_does_not_wait(seen: Seen, late: LateUsage) -> None:
    late.on_body(EVENT, 0)
    late.on_broken("gone")
    assert seen.calls == [EVENT, "gone"]


async def test_what_comes_after_the_release_does_not_wait(seen: Seen, late: LateUsage) -> None:
    late.on_body(EVENT, 0)
    late.release()
    late.on_body(EVENT, 0)
    late.on_end()
    assert seen.calls == [EVENT, EVENT, "end"]


async def test_a_client_does_not_wait_for_long(seen: Seen, late: LateUsage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.split.late_usage.PATIENCE", 0.0)
    late.on_body(EVENT, 0)
    assert seen.calls == []
    for _ in range(10):
        await asyncio.sleep(0)
    assert seen.calls == [EVENT]


async def test_what_was_dropped_does_not_come(seen: Seen, late: LateUsage) -> None:
    late.on_body(EVENT, 0)
    late.drop()
    late.release()
    assert seen.calls == []
