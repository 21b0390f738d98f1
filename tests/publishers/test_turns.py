"""Engines that are asked every so often are not asked all at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import aiohttp
import pytest

from engines.description import EngineDescription
from publishers.load_poller import LoadPoller
from publishers.turns import EARLY, until_turn
from tests.fakes.http_engine import HttpEngine, running

NAMES = [f"10.0.{number // 256}.{number % 256}:8000" for number in range(1000)]


def test_turns_are_an_interval_apart_however_long_each_took() -> None:
    now, turns = 1234.5, []
    for took in (0.0, 0.3, 1.99, 0.1):
        now += until_turn("gpu-1:8000", 2.0, now)
        turns.append(now)
        now += took
    assert [later - sooner for sooner, later in pairwise(turns)] == pytest.approx([2.0] * 3)


def test_who_took_longer_waits_for_the_turn_after() -> None:
    first = until_turn("gpu-1:8000", 2.0, 1000.0)
    assert until_turn("gpu-1:8000", 2.0, 1000.0 + first + 2.5) == pytest.approx(1.5)


def test_a_timer_that_goes_off_too_early_does_not_make_the_turn_come_twice() -> None:
    for interval in (2.0, 0.001):
        first = until_turn("gpu-1:8000", interval, 1000.0)
        early = 1000.0 + first - min(0.001, interval / 4)
        assert until_turn("gpu-1:8000", interval, early) > interval
    assert until_turn("gpu-1:8000", 2.0, 1000.0 + until_turn("gpu-1:8000", 2.0, 1000.0) - 0.01) == pytest.approx(0.01)


def test_engines_that_began_together_have_turns_of_their_own() -> None:
    """Whenever it is: a loop that stood still, so that many were due together, does not keep them together."""
    for now in (0.0, 7.3, 86_400.0):
        turns = [until_turn(name, 2.0, now) for name in NAMES]
        assert all(0.0 < turn <= 2.0 + EARLY for turn in turns)
        assert max(Counter(int(turn / 0.1) for turn in turns).values()) < 100


async def test_engines_that_are_polled_from_the_same_moment_on_are_not_polled_together_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        raise asyncio.CancelledError

    async with running(HttpEngine()) as engine, aiohttp.ClientSession() as session:
        unknown = EngineDescription("unknown")
        pollers = [LoadPoller(f"{engine.url}/{n}", unknown, session, lambda _: None, 60.0) for n in range(8)]
        with monkeypatch.context() as patch:
            patch.setattr("publishers.load_poller.asyncio.sleep", sleep)
            await asyncio.gather(*(poller.until_back() for poller in pollers), return_exceptions=True)
    assert len(waits) == len(pollers)
    assert all(0.0 < seconds <= 60.0 + EARLY for seconds in waits)
    assert len({int(seconds) for seconds in waits}) > len(waits) / 2
