"""A store that the fleet shares, in virtual time: nothing is lost, nothing stays, and what is loaded was put."""

from __future__ import annotations

import pytest

from engines.sim.store import Eviction
from router.ab.trace import Row
from router.scheduling.auto import Auto
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import Choice, Situation, Uniform
from router.simulation.arrival import Sample
from router.simulation.fleet import FleetSettings, VirtualFleet
from router.simulation.run import Run, find_policy
from router.simulation.source import Requests

STORE = FleetSettings(workers=2, cache_tokens=65_536, store_tokens=1_048_576, store_gb_s=10.0, store_base_s=0.01)
GB_S = 10e9 / STORE.kv_bytes_per_token
"""Tokens a second."""


def rows(seconds: float, rate: float = 1.0, workload: str = "small-caches") -> list[Row]:
    return Requests(workload=workload, duration=seconds).rows(0, rate)


def alike(at: float, tokens: int, first: int = 0) -> Row:
    """All that begin at the same id are alike, as far as they go."""
    return Row(at * 1000, tokens, 4, tuple(range(first, first - (-tokens // 512))))


def run(settings: FleetSettings, asked: list[Row], policy: str = "round-robin") -> tuple[VirtualFleet, list[Sample]]:
    virtual = VirtualFleet(settings, find_policy(policy))
    samples = virtual.run(asked)
    nothing_stays(virtual)
    return virtual, sorted(samples)


def nothing_stays(virtual: VirtualFleet) -> None:
    now = virtual.timeline.now()
    virtual.timeline.run(now + 60)
    for rank, worker in virtual.workers.items():
        engine = worker.scheduler
        assert (len(engine.running), len(engine.waiting), len(engine.loading), engine.kept) == (0, 0, 0, 0)
        assert engine.cache.free_blocks == engine.cache.capacity
        engine.cache.check_integrity()
        assert virtual.scheduler.book.load(rank, now + 60).requests == 0
    assert not virtual.fetching
    assert not any(virtual._sent.values())
    if virtual.shared:
        assert not virtual.shared.loaded_tokens
        assert len(virtual.shared.store) <= virtual.shared.store.capacity


def test_what_one_worker_computed_another_loads() -> None:
    virtual, (first, second, third, fourth) = run(STORE, [alike(at, 8000) for at in (0, 2, 4, 6)])
    assert [sample.worker for sample in (first, second, third, fourth)] == [0, 1, 0, 1]
    assert (first.cached_tokens, first.stored_tokens) == (0, 0)
    assert (second.cached_tokens, second.stored_tokens) == (0, 7984)
    assert (third.cached_tokens, third.stored_tokens) == (7984, 0)
    assert (fourth.cached_tokens, fourth.stored_tokens) == (7984, 0)
    assert third.ttft is not None
    assert second.ttft == pytest.approx(third.ttft + 0.01 + 7984 / GB_S, abs=1e-3)
    assert virtual.shared
    assert virtual.shared.store.counters.reused == 7984 // 16


def test_the_rest_of_a_prompt_is_computed() -> None:
    _, (_, second) = run(STORE, [alike(0, 5000), alike(2, 8000)])
    assert (second.cached_tokens, second.stored_tokens) == (0, 4992)


def test_only_what_the_worker_lacks_is_loaded() -> None:
    """The first worker has computed 2,048 tokens of what the second computes more of."""
    asked = [alike(0, 2048), alike(2, 8000), alike(4, 8000)]
    _, samples = run(STORE, asked)
    assert [(sample.cached_tokens, sample.stored_tokens) for sample in samples] == [(0, 0), (0, 2048), (2048, 5936)]


def test_where_the_store_has_nothing_it_costs_nothing() -> None:
    asked = [alike(at, 3000, first) for at, first in ((0, 0), (0.01, 100), (0.02, 200), (3, 300))]
    _, with_store = run(STORE, asked)
    _, without = run(STORE._replace(store_tokens=0), asked)
    assert with_store == without


def test_loads_of_one_worker_queue_and_others_are_computed_meanwhile() -> None:
    slow = STORE._replace(workers=1, cache_tokens=20_480, store_gb_s=0.5)
    seconds = 8000 / GB_S * 20
    first = [alike(0, 8000), alike(4, 8000, 100), alike(8, 20_000, 200)]
    again = [alike(12, 8000), alike(12, 8000, 100), alike(12.1, 200, 300)]
    _, samples = run(slow, first + again)
    one, two, new = samples[3:]
    assert one.stored_tokens == two.stored_tokens == 7984
    assert one.ttft == pytest.approx(seconds, rel=0.05)
    assert two.ttft == pytest.approx(2 * seconds, rel=0.05)
    assert new.ttft is not None
    assert new.ttft < 0.1


@pytest.mark.parametrize("eviction", ["fifo", "lru", "sieve"])
@pytest.mark.parametrize("tokens", [16, 512, 20_000, 200_000])
@pytest.mark.parametrize("ttl", [None, 1.0])
def test_nothing_is_lost_whatever_the_store_forgets(eviction: Eviction, tokens: int, ttl: float | None) -> None:
    settings = STORE._replace(workers=4, store_tokens=tokens, store_eviction=eviction, store_ttl_s=ttl)
    asked = rows(20, 4)
    virtual, samples = run(settings, asked, "auto")
    assert len(samples) == len(asked)
    assert {sample.fate for sample in samples} == {"answered"}
    assert virtual.shared
    counters = virtual.shared.store.counters
    assert counters.stored - counters.evicted - counters.expired - counters.lost == len(virtual.shared.store)
    assert counters.evicted > 0 or tokens == 200_000
    assert counters.expired > 0 or ttl is None or tokens < 20_000


def test_what_is_loaded_is_what_was_counted() -> None:
    virtual, samples = run(STORE._replace(workers=4, cache_tokens=65_536), rows(20, 3), "round-robin")
    loaded = sum(worker.scheduler.counters.transferred_tokens for worker in virtual.workers.values())
    assert virtual.shared
    assert loaded == sum(sample.stored_tokens for sample in samples) == virtual.shared.store.counters.reused * 16 > 0


@pytest.mark.parametrize("at", [3.0, 3.01, 3.3, 4.0])
@pytest.mark.parametrize("gb_s", [0.2, 10.0])
def test_owners_that_die_take_what_only_they_had(at: float, gb_s: float) -> None:
    settings = STORE._replace(workers=4, store_gb_s=gb_s)
    virtual = VirtualFleet(settings, find_policy("round-robin"))

    def during(running: VirtualFleet) -> None:
        running.timeline.call_at(at, running.kill, 0)
        running.timeline.call_at(at + 0.5, running.kill, 1)

    asked = rows(8, 4)
    samples = virtual.run(asked, during)
    assert len(samples) == len(asked)
    assert all(sample.first is not None for sample in samples if sample.fate != "answered")
    assert virtual.shared
    assert virtual.shared.store.counters.lost > 0
    nothing_stays(virtual)


@pytest.mark.parametrize("replicas", [1, 2, 3, 9])
def test_copies_outlive_their_first_owner(replicas: int) -> None:
    virtual = VirtualFleet(STORE._replace(workers=3, store_replicas=replicas), find_policy("round-robin"))

    def during(running: VirtualFleet) -> None:
        running.timeline.call_at(3.0, running.kill, 0)

    _, second = sorted(virtual.run([alike(0, 8000), alike(4, 8000)], during))
    assert second.stored_tokens == (0 if replicas == 1 else 7984)
    assert virtual.shared
    assert len(virtual.shared.store) == {1: 1, 2: 1}.get(replicas, 2) * 500
    assert virtual.shared.store.counters.lost == (500 if replicas == 1 else 0)


def test_what_dies_while_it_is_loaded_is_computed() -> None:
    virtual = VirtualFleet(STORE._replace(store_gb_s=0.5), find_policy("round-robin"))

    def during(running: VirtualFleet) -> None:
        running.timeline.call_at(3.0, running.kill, 0)

    _, second = sorted(virtual.run([alike(0, 8000), alike(2, 8000)], during))
    assert (second.fate, second.stored_tokens) == ("answered", 0)
    assert second.ttft is not None
    assert second.ttft > 8000 / GB_S * 20
    nothing_stays(virtual)


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("killed", [None, 0, 4])
def test_prefill_and_decode_workers_share_a_store(push: bool, killed: int | None) -> None:
    settings = STORE._replace(workers=8, prefill=3, decode=3, push=push)
    virtual = VirtualFleet(settings, Cheapest(Auto()))

    def during(running: VirtualFleet) -> None:
        if killed is not None:
            running.timeline.call_at(3.3, running.kill, killed)

    asked = rows(8, 4)
    samples = virtual.run(asked, during)
    assert len(samples) == len(asked)
    assert killed is not None or {sample.fate for sample in samples} == {"answered"}
    assert sum(sample.stored_tokens for sample in samples) > 0
    nothing_stays(virtual)


class Listening:
    """Round robin that notes what could be loaded."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self._policy = find_policy("round-robin")

    def choose(self, situation: Situation, random: Uniform) -> Choice:
        self.told.append(int(situation.stored_tokens.max()))
        return self._policy.choose(situation, random)


@pytest.mark.parametrize("credit", [True, False])
def test_the_router_is_told_of_the_store_or_not(credit: bool) -> None:
    policy = Listening()
    VirtualFleet(STORE._replace(store_credit=credit), policy).run(
        [alike(0, 8000), alike(2, 5000, 0), alike(4, 700, 90)]
    )
    assert policy.told == [0, 4992 if credit else 0, 0]


def test_a_seed_decides_a_run_with_a_store() -> None:
    settings = STORE._replace(workers=4, store_eviction="sieve", store_ttl_s=20.0)
    one = Run(Requests("small-caches", duration=15.0), settings, "auto", rate=3.0)
    figures = one.figures()
    assert figures == one.figures() != one._replace(seed=1).figures()
    assert figures.store_ratio
    assert 0 < figures.store_ratio + figures.hit_ratio < 1
    assert one._replace(fleet=FleetSettings(workers=4)).figures().store_ratio is None
