"""How often an engine is asked for its load, and that reports go on meanwhile."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from engines.description import EngineDescription
from publishers.load_poller import MOST_SILENT, LoadCounts, LoadPoller
from tests.fakes.http_engine import HttpEngine, running

GONE = 503, b""


class Enough(Exception):
    pass


async def polls_at(
    reports: int, engine: HttpEngine, monkeypatch: pytest.MonkeyPatch, *, interval: float = 1.0, noticed: int = 0
) -> list[int]:
    """At which of so many reports, from 0 on, the engine was polled. That it may be back is noticed after the report of
    that number."""
    counts, polls = LoadCounts(), [0]
    turn = asyncio.sleep

    def on_load(_: object) -> None:
        polls.append(counts.polls)
        if len(polls) - 1 == noticed:
            poller.look_again()
        if len(polls) - 1 == reports:
            raise Enough

    async with aiohttp.ClientSession() as session:
        poller = LoadPoller(engine.url, EngineDescription("vllm"), session, on_load, interval, counts)
        with monkeypatch.context() as patch:
            patch.setattr("publishers.load_poller.asyncio.sleep", lambda _: turn(0))
            with pytest.raises(Enough):
                await poller.until_back()
    return [number for number in range(reports) if polls[number] < polls[number + 1]]


@pytest.mark.parametrize(
    ("interval", "polled"),
    [(1.0, [0, 1, 3, 7, 11, 15, 19]), (0.5, [0, 1, 3, 7, 15]), (3.0, list(range(20))), (60.0, list(range(20)))],
)
async def test_an_engine_that_is_gone_is_polled_every_four_seconds_and_reported_on_each_interval(
    interval: float, polled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(HttpEngine({"/metrics": GONE})) as engine:
        assert await polls_at(20, engine, monkeypatch, interval=interval) == polled


async def test_once_it_may_be_back_it_is_polled_at_the_next_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(HttpEngine({"/metrics": GONE})) as engine:
        assert await polls_at(16, engine, monkeypatch, noticed=9) == [0, 1, 3, 7, 9, 11, 15]


async def test_one_that_answers_is_polled_each_interval_even_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(HttpEngine({"/metrics": (200, b"")})) as engine:
        assert await polls_at(9, engine, monkeypatch) == list(range(9))


async def test_one_that_answers_late_is_polled_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is busy, and then its load matters most."""
    monkeypatch.setattr("publishers.load_poller.TIMEOUT", 0.01)
    over = asyncio.Event()

    async def late(_: bytes) -> tuple[int, bytes]:
        await over.wait()
        return GONE

    async with running(HttpEngine()) as engine:
        engine.answers["/metrics"] = late
        assert await polls_at(4, engine, monkeypatch) == [0, 1, 2, 3]
        over.set()


LOAD = 200, b'vllm:num_requests_running{engine="0"} 3.0\n'


@pytest.mark.parametrize("told", [LOAD, GONE])
async def test_one_that_tells_its_load_or_is_gone_is_not_taken_for_another(
    told: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("publishers.load_poller.MOST_SILENT", 3)
    async with running(HttpEngine({"/metrics": told})) as engine:
        assert len(await polls_at(40, engine, monkeypatch)) > 6


async def test_one_that_tells_no_load_may_be_another_after_a_while() -> None:
    counts = LoadCounts()
    async with running(HttpEngine({"/metrics": (200, b"")})) as engine, aiohttp.ClientSession() as session:
        poller = LoadPoller(engine.url, EngineDescription("vllm"), session, lambda _: None, 0.001, counts)
        await poller.until_back()
        assert (counts.polls, counts.failures) == (MOST_SILENT, MOST_SILENT)


async def test_one_that_tells_its_load_after_it_did_not_may_be_another() -> None:
    async with running(HttpEngine({"/metrics": (200, b"")})) as engine, aiohttp.ClientSession() as session:

        def on_load(_: object) -> None:
            if poller.counts.polls == 3:
                engine.answers["/metrics"] = LOAD

        poller = LoadPoller(engine.url, EngineDescription("vllm"), session, on_load, 0.001)
        async with asyncio.timeout(30):
            await poller.until_back()
        assert (poller.counts.polls, poller.counts.failures) == (4, 3)
