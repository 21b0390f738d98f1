"""Every fault of every part, on the strict simulated fleet: another pair serves the request where it still can, else
the client gets one proper error; and nothing is left behind (`fleets.fleet` looks)."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from engines.sim.timing import StepTiming
from indexer.types import WorkerRank
from router.workers.breaker import FAILURES
from tests.engines.sim.fleets import INSTANT, events
from tests.fakes.raw_client import post
from tests.fakes.waiting import until
from tests.router.disaggregation.fleets import (
    CONNECTORS,
    PROMPT,
    Fleet,
    alone,
    fleet,
    streamed_text,
    text_of,
)
from tests.router.scheduling.predictions import unfit

BODY: dict[str, Any] = {"model": "sim", "prompt": PROMPT, "max_tokens": 6}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BEFORE_FIRST_BYTE = ("drop_before_first_byte", "error500", "error503")
"""The drop comes first: one on a connection that was used before is no sign of trouble."""


async def ask(pairs: Fleet, stream: bool) -> tuple[int, str]:
    """Status and text."""
    status, answer = await pairs.post(BODY | (STREAM if stream else {}))
    if status != 200:
        return status, str(answer)
    return status, streamed_text(events(answer.encode())) if stream else text_of(answer)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    async def find() -> dict[str, str]:
        return {connector: await alone(connector, BODY) for connector in ("nixl", "sglang")}

    found = asyncio.run(find())
    return {connector: found.get(connector, found["nixl"]) for connector in CONNECTORS}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_leg_that_fails_before_its_first_byte(connector: str, leg: str, expected: dict[str, str]) -> None:
    """Another pair serves the request; the failure is counted at the leg that failed."""
    attempts = [(BEFORE_FIRST_BYTE[0], False), *itertools.product(BEFORE_FIRST_BYTE[1:], (False, True))]
    async with fleet(connector, prefills=2, decodes=2) as pairs:
        for number, (kind, stream) in enumerate(attempts, 1):
            pairs.strike(leg[0], kind)
            assert await ask(pairs, stream) == (200, expected[connector]), kind
            assert pairs.failures() == {leg: number}
            await pairs.settled()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_leg_that_hangs(connector: str, leg: str, expected: dict[str, str]) -> None:
    # A prefill of SGLang waits for its decode to come: which of them hangs cannot be seen.
    blamed = "prefill" if connector == "sglang" else leg
    async with fleet(connector, prefills=2, decodes=2) as pairs:
        for number, stream in enumerate((False, True), 1):
            pairs.strike(leg[0], "hang")
            asking = asyncio.create_task(ask(pairs, stream))
            await until(lambda: pairs.busy(leg[0]) and pairs.busy(blamed[0]))
            await pairs.run_out_of_time(blamed)
            assert await asking == (200, expected[connector])
            assert pairs.failures() == {blamed: number}
            await pairs.settled()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_both_parts_are_begun_anew_where_a_kept_connection_breaks(
    connector: str, leg: str, expected: dict[str, str]
) -> None:
    """Its worker may have got the request all the same: then its KV was fetched and is gone, or is kept for nobody."""
    async with fleet(connector) as pairs:
        assert await ask(pairs, stream=False) == (200, expected[connector])
        await pairs.settled()
        pairs.strike(leg[0], "break_after_tokens", after=0)
        assert await ask(pairs, stream=False) == (200, expected[connector])
        assert pairs.failures() == {}


@pytest.mark.parametrize(("leg", "prefills", "decodes"), [("prefill", 2, 1), ("decode", 1, 2)])
async def test_both_parts_are_begun_anew_without_a_worker_that_may_just_have_died(
    leg: str, prefills: int, decodes: int, expected: dict[str, str]
) -> None:
    """Connections are reset for a moment before they are refused."""
    async with fleet("nixl", prefills=prefills, decodes=decodes) as pairs:
        for name in (f"{leg[0]}0", f"{leg[0]}1"):
            assert await ask(pairs, stream=False) == (200, expected["nixl"])
            pairs.strike(name, "break_after_tokens", after=0, count=2)
            assert await ask(pairs, stream=False) == (200, expected["nixl"])
            pairs.worker(name).faults.clear()
        assert pairs.failures() == {}


async def test_a_fault_in_what_a_prefill_teaches_costs_no_answer(
    expected: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet("nixl", router_mode="kv") as pairs:
        unfit(pairs.router.app._scheduler.latency, "_latest", WorkerRank("p0", 0))
        assert await ask(pairs, stream=True) == (200, expected["nixl"])
        assert "A prefill could not be learned from" in caplog.messages


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_leg_has_its_own_limit(leg: str, expected: dict[str, str]) -> None:
    async with fleet("nixl", pd_timeout=0.5) as pairs:
        pairs.strike(leg[0], "hang")
        status, answer = await pairs.post(BODY | STREAM)
        assert status == 504
        assert answer["error"]["message"].endswith("within 0.5 s.")
        assert pairs.failures() == {leg: 1}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_lone_pair_that_fails(connector: str, leg: str, expected: dict[str, str]) -> None:
    """There is nobody else: one proper error, and the next request is served."""
    async with fleet(connector) as pairs:
        for number, kind in enumerate(BEFORE_FIRST_BYTE, 1):
            pairs.strike(leg[0], kind)
            status, answer = await pairs.post(BODY)
            assert status in {500, 502, 503}
            assert answer["error"]["message"] if "error" in answer else answer["message"]
            assert pairs.failures() == {leg: number}
            await pairs.settled()
        assert await ask(pairs, stream=True) == (200, expected[connector])


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_two_failures_are_enough(connector: str) -> None:
    async with fleet(connector, prefills=3, decodes=3) as pairs:
        for names in ("p", "d"):
            pairs.strike(names, "error500", count=2)
            status, _ = await pairs.post(BODY)
            assert status in {500, 502}
            await pairs.settled()
            assert (await pairs.post(BODY))[0] == 200
            await pairs.settled()


@pytest.mark.parametrize(("leg", "prefills", "decodes"), [("decode", 1, 2), ("prefill", 2, 1)])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_the_half_of_which_there_are_two_is_replaced(
    connector: str, leg: str, prefills: int, decodes: int, expected: dict[str, str]
) -> None:
    async with fleet(connector, prefills=prefills, decodes=decodes) as pairs:
        for number, kind in enumerate(BEFORE_FIRST_BYTE, 1):
            pairs.strike(leg[0], kind)
            assert await ask(pairs, stream=False) == (200, expected[connector]), kind
            assert pairs.failures() == {leg: number}
            await pairs.settled()


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_the_second_attempt_is_not_sent_to_the_worker_that_failed(
    connector: str, expected: dict[str, str]
) -> None:
    async with fleet(connector, prefills=2, decodes=2) as pairs:
        for name in ("d0", "p0"):
            pairs.strike(name, "error500", count=100)
            for _ in range(4):
                assert await ask(pairs, stream=False) == (200, expected[connector])
            assert pairs.failures()
            pairs.worker(name).faults.clear()


async def test_a_decode_workers_error_is_held_against_both_until_others_show_whose_it_was() -> None:
    """Engines do not tell whether it was the KV that could not be fetched."""
    async with fleet("nixl", prefills=1, decodes=2) as pairs:
        pairs.strike("d", "error500", count=FAILURES)
        while pairs.failures().get("decode", 0) < FAILURES:
            await pairs.post(BODY)
        assert [pairs.breaker(name) for name in ("p0", "d0", "d1")] == ["open", "closed", "closed"]


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_stream_that_breaks_ends_with_an_error_event(connector: str, expected: dict[str, str]) -> None:
    async with fleet(connector, prefills=2, decodes=2) as pairs:
        pairs.strike("d", "break_after_tokens", after=3)
        status, answer = await pairs.post(BODY | STREAM)
        *told, error = events(answer.encode())
        # What was written just before the connection was cut may be lost with it.
        assert (status, streamed_text(told)) in [(200, expected[connector][:length]) for length in (2, 3)]
        assert "broke off its answer" in error["error"]["message"]
        assert pairs.failures() == {"decode": 1}
        assert await ask(pairs, stream=True) == (200, expected[connector])


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_plain_answer_that_breaks_is_asked_for_again(connector: str, expected: dict[str, str]) -> None:
    async with fleet(connector, prefills=2, decodes=2) as pairs:
        pairs.strike("d", "break_after_tokens", after=3)
        assert await ask(pairs, stream=False) == (200, expected[connector])
        assert pairs.failures() == {"decode": 1}


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_transfer_that_fails(connector: str, expected: dict[str, str]) -> None:
    """In a stream, which has begun by then, both engines say it where the first token should be."""
    async with fleet(connector, prefills=2, decodes=2) as pairs:
        for number, stream in enumerate((False, True), 1):
            pairs.strike("d", "transfer_fails")
            assert await ask(pairs, stream) == (200, expected[connector])
            assert pairs.failures() == {"decode": number}
            await pairs.settled()
            for worker in pairs.sim.workers:
                assert worker.reset_cache()


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_transfer_that_fails_where_there_is_nobody_else(connector: str, expected: dict[str, str]) -> None:
    async with fleet(connector) as pairs:
        pairs.strike("d", "transfer_fails")
        status, answer = await pairs.post(BODY | STREAM)
        error, done = events(answer.encode())
        assert (status, done) == (200, "[DONE]")
        assert "message" in error.get("error", error)
        assert pairs.failures() == {"decode": 1}
        await pairs.settled()
        assert await ask(pairs, stream=True) == (200, expected[connector])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_transfer_that_hangs(connector: str, stream: bool, expected: dict[str, str]) -> None:
    async with fleet(connector, prefills=2, decodes=2) as pairs:
        pairs.strike("d", "transfer_hangs")
        asking = asyncio.create_task(ask(pairs, stream))
        await until(lambda: pairs.pairs.state()["loading"] and not pairs.busy("p"))
        await pairs.run_out_of_time("decode")
        assert await asking == (200, expected[connector])
        assert pairs.failures() == {"decode": 1}


STAGES = ("prefilling", "moving", "decoding")


@pytest.mark.parametrize("victim", ["p", "d"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_worker_that_dies(
    connector: str, stream: bool, stage: str, victim: str, expected: dict[str, str]
) -> None:
    # Each stage is long enough to be seen; the rest goes fast once the worker is dead.
    sim = {
        "timing": StepTiming(base_s=1.0 if stage == "prefilling" else 0.01),
        "transfer_base_s": 1.0 if stage == "moving" else 0.005,
    }
    body = BODY | ({"max_tokens": 300} if stage == "decoding" else {})
    async with fleet(connector, prefills=2, decodes=2, sim=sim) as pairs:
        asking = asyncio.create_task(pairs.post(body | (STREAM if stream else {})))

        def reached() -> bool:
            """The stage is; of a worker that has the request the counters tell more."""
            decodes = [pairs.worker(name).ranks[0].scheduler for name in pairs.busy("d")]
            if stage == "prefilling":
                return any(pairs.worker(name).ranks[0].scheduler.counters.prefill_tokens for name in pairs.busy("p"))
            if stage == "moving":
                return not pairs.busy("p") and any(scheduler.loading for scheduler in decodes)
            return any(scheduler.counters.generated_tokens > 2 for scheduler in decodes)

        await until(reached)
        prefilled = {name for name in ("p0", "p1") if pairs.worker(name).ranks[0].scheduler.counters.prefill_tokens}
        dying = pairs.busy(victim) or sorted(prefilled if victim == "p" else {"d0"})
        await pairs.kill(dying[0])
        for scheduler in pairs.pairs.schedulers:
            scheduler.timing = INSTANT
        transfers = pairs.pairs.transfers
        transfers.settings = replace(transfers.settings, transfer_base_s=0.0)
        status, answer = await asking
        assert status == 200, answer
        if stream and stage == "decoding" and victim == "d":
            *told, error = events(answer.encode())
            assert "broke off" in error["error"]["message"]
            assert 2 <= len(streamed_text(told)) < 300
            assert streamed_text(told)[:6] == expected[connector][: len(streamed_text(told))]
        else:
            text = streamed_text(events(answer.encode())) if stream else text_of(answer)
            assert (len(text), text[:6]) == (body["max_tokens"], expected[connector])
        await pairs.settled()
        for _ in range(2):
            assert await ask(pairs, stream) == (200, expected[connector])


WITHOUT_END = StepTiming(base_s=3600.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_client_that_leaves_while_its_prompt_is_computed(connector: str, stream: bool) -> None:
    async with fleet(connector, sim={"timing": WITHOUT_END}) as pairs, pairs.router.client() as client:
        client.send(post(body=json.dumps(BODY | {"stream": stream}).encode()))
        await until(lambda: pairs.worker("p0").ranks[0].scheduler.counters.prefill_tokens)
        client.vanish()
        await pairs.settled()
        assert pairs.router.total("router_requests_total", end="cancelled", status="499") == 1
        assert pairs.failures() == {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_client_that_leaves_while_its_kv_is_moved(connector: str, stream: bool) -> None:
    async with fleet(connector) as pairs, pairs.router.client() as client:
        pairs.strike("d", "transfer_hangs")
        client.send(post(body=json.dumps(BODY | {"stream": stream}).encode()))
        await until(lambda: pairs.worker("d0").ranks[0].scheduler.loading and not pairs.worker("p0").in_flight)
        client.vanish()
        await pairs.settled()
        assert pairs.router.total("router_requests_total", end="cancelled", status="499") == 1
        assert pairs.failures() == {}


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_client_that_leaves_in_the_middle_of_a_stream(connector: str) -> None:
    slow = StepTiming(base_s=0.02)
    async with fleet(connector, sim={"timing": slow}) as pairs, pairs.router.client() as client:
        client.send(post(body=json.dumps(BODY | {"stream": True, "max_tokens": 1000}).encode()))
        await client.head()
        await client.chunk()
        assert pairs.worker("d0").in_flight == 1
        client.vanish()
        await pairs.settled()
        assert pairs.router.total("router_requests_total", end="cancelled", status="499") == 1
        assert pairs.failures() == {}
