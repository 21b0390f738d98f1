"""A live A/B test through a whole router: who goes where, what the client is told, what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import generate_latest

from router.arms import ArmTally
from tests.fakes.raw_client import post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, answer, drop
from tests.router.proxy.running import RunningRouter, running

USAGE = b'{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":60}}}'


async def arm_of(router: RunningRouter, *headers: bytes, path: str = "/v1/completions") -> bytes | None:
    async with router.client() as client:
        return (await client.ask(post(path, b'{"prompt":"hello"}', *headers))).header(b"x-router-arm")


async def test_without_a_test_nothing_is_told_or_counted(a: ScriptedWorker) -> None:
    async with running(a) as router:
        assert await arm_of(router) is None
        assert b"router_ab" not in generate_latest(router.app._metrics.registry)


async def test_requests_are_split_and_told_of_it(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with running(a, b, ab="random:50,round-robin:50") as router:
        told = Counter([await arm_of(router) for _ in range(40)])
        assert told.keys() == {b"random", b"round-robin"}
        for arm, count in told.items():
            name = (arm or b"").decode()
            assert router.total("router_ab_requests_total", arm=name, end="complete") == count
            assert router.total("router_ab_first_byte_seconds_count", arm=name) == count
            assert router.total("router_ab_request_seconds_count", arm=name) == count


async def test_a_fault_in_counting_keeps_no_client_waiting(a: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ArmTally, "finished", fail)
    async with running(a, ab="random:50,round-robin:50") as router, router.client() as client:
        a.then(answer(), drop, drop)
        assert [(await client.ask(post())).status for _ in range(3)] == [200, 502, 200]


async def test_arms_meet_the_same_workers_with_a_seed_too(a: ScriptedWorker, b: ScriptedWorker) -> None:
    """Else the same arm twice would compare two workers."""
    async with running(a, b, ab="random:1,random:1", seed=0) as router, router.client() as client:
        answers = [await client.ask(post()) for _ in range(60)]
    met = Counter((one.header(b"x-router-arm"), one.header(b"x-router-worker")) for one in answers)
    assert len(met) == 4
    assert min(met.values()) > 5


async def test_a_session_stays_with_its_arm(a: ScriptedWorker) -> None:
    async with running(a, ab="random:50,round-robin:50", ab_sticky="X-Session-Id") as router:
        found = {number: {await arm_of(router, b"x-session-id: %d" % number) for _ in range(3)} for number in range(8)}
    assert all(len(arms) == 1 for arms in found.values())
    assert len(set.union(*found.values())) == 2


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
async def test_arms_that_look_at_prompts_make_all_be_read(a: ScriptedWorker, mode: str) -> None:
    """And so the index is asked for both, and what the engine had cached can be compared with it."""

    async def reports(dialogue: Dialogue) -> None:
        dialogue.head(200, b"content-type: application/json", length=len(USAGE))
        dialogue.send(USAGE)

    a.then(*[reports] * 20)
    async with running(a, router_mode=mode, ab="kv/overlap:1,round-robin:1") as router:
        async with router.client() as client:
            told = [await client.ask(post()) for _ in range(20)]
        assert all(one.header(b"x-router-overlap-tokens") is not None for one in told)
        for arm in ("kv/overlap", "round-robin"):
            requests = router.total("router_ab_requests_total", arm=arm)
            assert requests > 0
            assert router.total("router_ab_prompt_tokens_total", arm=arm) > 0
            assert router.total("router_ab_reported_prompt_tokens_total", arm=arm) == 100 * requests
            assert router.total("router_ab_reported_cached_tokens_total", arm=arm) == 60 * requests


async def test_a_zero_that_an_engine_leaves_out_counts(a: ScriptedWorker) -> None:
    """SGLang to 0.5.18 tells `null` where nothing was cached: hits alone would be in the arm's hit rate."""

    def telling(cached: bytes) -> Callable[[Dialogue], Awaitable[None]]:
        usage = b'{"usage":{"prompt_tokens":100,"prompt_tokens_details":%s}}' % cached

        async def tell(dialogue: Dialogue) -> None:
            dialogue.head(200, b"content-type: application/json", length=len(usage))
            dialogue.send(usage)

        return tell

    hit, nothing, zero = (telling(told) for told in (b'{"cached_tokens":60}', b"null", b'{"cached_tokens":0}'))
    a.then(nothing, hit, nothing, nothing, zero, nothing)
    async with running(a, ab="random:1,round-robin:1") as router, router.client() as client:

        async def reported() -> tuple[float, float]:
            await client.ask(post())
            await router.at_rest()
            names = (f"router_ab_reported_{which}_tokens_total" for which in ("cached", "prompt"))
            cached, prompt = (router.total(name) for name in names)
            return cached, prompt

        assert [await reported() for _ in range(4)] == [(0, 0), (60, 100), (60, 200), (60, 300)]
        # Whoever tells a zero means nothing by leaving it out.
        assert [await reported() for _ in range(2)] == [(60, 400), (60, 400)]


async def test_other_requests_take_no_part(a: ScriptedWorker) -> None:
    """Embeddings, say, and those that name their worker."""
    async with running(a, ab="random:50,round-robin:50") as router:
        assert await arm_of(router, path="/v1/embeddings") is None
        assert await arm_of(router, b"x-router-target-worker: a") is None
        assert router.total("router_ab_requests_total") == 0


async def test_a_refusal_names_the_arm(a: ScriptedWorker) -> None:
    async with running(a, ab="random:50,round-robin:50") as router:
        router.app._fleet.mark_down(router.app._fleet.workers["a"], "gone")
        assert await arm_of(router) in {b"random", b"round-robin"}
        assert router.total("router_ab_requests_total", end="failed") == 1
        assert router.total("router_ab_first_byte_seconds_count") == 0


async def test_so_does_the_answer_to_a_request_that_its_worker_failed(a: ScriptedWorker) -> None:
    a.then(drop)
    async with running(a, ab="random:50,round-robin:50") as router:
        assert await arm_of(router) in {b"random", b"round-robin"}
        assert router.total("router_ab_requests_total", end="failed") == 1


async def test_an_arm_that_another_router_told_is_not_passed_on(a: ScriptedWorker) -> None:
    """Of routers in a row each tells its own."""

    async def other(dialogue: Dialogue) -> None:
        dialogue.head(200, b"x-router-arm: theirs", length=2)
        dialogue.send(b"{}")

    a.then(other)
    async with running(a) as router:
        assert await arm_of(router) is None
