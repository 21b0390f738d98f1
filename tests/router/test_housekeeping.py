"""What the router does once a second: in order, each in spite of the others, and late when the process stood still."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from router.housekeeping import INTERVAL, Chore, Housekeeping

Seen = list[tuple[str, float]]


class OverError(Exception):
    """All that the test has planned has happened."""


async def rounds(chores: dict[str, Chore], *sleeps: float) -> None:
    """One sleep after the other takes as long as this, instead of `INTERVAL`."""
    left, now = list(sleeps), 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds == INTERVAL
        if not left:
            raise OverError
        now += left.pop(0)

    with pytest.raises(OverError):
        await Housekeeping(chores, lambda: now, sleep).run()


def noting(seen: Seen, name: str) -> Callable[[float], None]:
    return lambda now: seen.append((name, now))


async def test_all_are_done_in_order_in_each_round() -> None:
    seen: Seen = []
    await rounds({name: noting(seen, name) for name in "ab"}, 1.0, 1.0)
    assert seen == [("a", 1.0), ("b", 1.0), ("a", 2.0), ("b", 2.0)]


async def test_one_that_takes_its_time_is_waited_for() -> None:
    seen: Seen = []

    async def slow(now: float) -> None:
        await asyncio.sleep(0)
        seen.append(("slow", now))

    await rounds({"slow": slow, "b": noting(seen, "b")}, 1.0)
    assert seen == [("slow", 1.0), ("b", 1.0)]


async def test_one_that_fails_keeps_none_from_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    seen: Seen = []

    def fail(now: float) -> None:
        raise ValueError(now)

    async def fail_later(now: float) -> None:
        await asyncio.sleep(0)
        raise ValueError(now)

    with caplog.at_level(logging.ERROR):
        await rounds({"first": fail, "a": noting(seen, "a"), "second": fail_later, "b": noting(seen, "b")}, 1.0, 1.0)
    assert seen == [("a", 1.0), ("b", 1.0), ("a", 2.0), ("b", 2.0)]
    named = [getattr(record, "fields", {}).get("chore") for record in caplog.records]
    assert named == ["first", "second"] * 2
    assert all(record.exc_info for record in caplog.records)


async def test_after_it_stood_still_it_sleeps_once_more() -> None:
    """So that what came meanwhile is read first."""
    seen: Seen = []
    await rounds({"a": noting(seen, "a")}, 1.0, 60.0, 1.0, 1.0)
    assert seen == [("a", 1.0), ("a", 62.0), ("a", 63.0)]
