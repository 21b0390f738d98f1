"""A second tier in host memory, in virtual time: what leaves a cache comes back from there, and the index knows."""

from __future__ import annotations

import pytest

from indexer.types import Tier
from router.ab.trace import Row
from router.simulation.arrival import Sample
from router.simulation.fleet import FleetSettings, VirtualFleet
from router.simulation.run import Run, find_policy
from router.simulation.source import Requests

HOST = FleetSettings(workers=1, cache_tokens=16_384, host_tokens=65_536, host_gb_s=10.0, host_base_s=0.01)
TOKENS_S = 10e9 / HOST.kv_bytes_per_token


def alike(at: float, tokens: int, first: int = 0) -> Row:
    """All that begin at the same id are alike, as far as they go."""
    return Row(at * 1000, tokens, 4, tuple(range(first, first - (-tokens // 512))))


def run(settings: FleetSettings, asked: list[Row]) -> tuple[VirtualFleet, list[Sample]]:
    virtual = VirtualFleet(settings, find_policy("auto"))
    samples = sorted(virtual.run(asked))
    virtual.timeline.run(virtual.timeline.now() + 60)
    for rank, worker in virtual.workers.items():
        engine = worker.scheduler
        assert (len(engine.running), len(engine.waiting), len(engine.loading)) == (0, 0, 0)
        assert virtual.scheduler.book.load(rank, virtual.timeline.now()).requests == 0
    assert not virtual.scheduler.cpu_loads.tokens
    return virtual, samples


def blocks(virtual: VirtualFleet, tier: Tier) -> int:
    return sum(virtual.index.blocks(rank, tier) for rank in virtual.ranks)


def test_what_left_the_cache_is_loaded() -> None:
    """The second prompt takes all of the cache."""
    asked = [alike(0, 8_000), alike(2, 16_368, 100), alike(4, 8_000)]
    virtual, (first, _, third) = run(HOST, asked)
    assert (first.cached_tokens, third.cached_tokens) == (0, 7_984)
    _, (_, _, cached) = run(HOST._replace(cache_tokens=65_536), asked)
    assert third.ttft is not None
    assert cached.ttft is not None
    assert third.ttft == pytest.approx(cached.ttft + 0.01 + 7_984 / TOKENS_S, abs=1e-3)
    assert blocks(virtual, Tier.CPU) == (8_000 + 16_368) // 16
    assert run(HOST._replace(host_tokens=0), asked)[1][2].cached_tokens == 0


def test_only_what_the_cache_lacks_is_loaded() -> None:
    """The second prompt leaves half of the first one, which lost its tail."""
    asked = [alike(0, 8_000), alike(2, 12_000, 100), alike(4, 8_000)]
    _, (_, _, third) = run(HOST, asked)
    assert third.cached_tokens == 7_984
    assert third.ttft is not None
    assert 0.01 < third.ttft - 0.01 < 0.01 + 6_000 / TOKENS_S


def test_the_least_recently_used_go_and_the_index_is_told() -> None:
    """5 × 16,000 tokens in 65,536; the first is used again before the last comes."""
    asked = [alike(2 * at, 16_000, 100 * at) for at in range(4)]
    asked += [alike(8, 16_000, 0), alike(10, 16_000, 900), alike(12, 16_000, 0), alike(14, 16_000, 100)]
    virtual, samples = run(HOST, asked)
    assert [sample.cached_tokens for sample in samples[4:7]] == [15_984, 0, 15_984]
    assert 0 < samples[7].cached_tokens < 12_000  # its tail went when the last came
    assert blocks(virtual, Tier.CPU) == HOST.host_tokens // 16


DISK = HOST._replace(host_tokens=16_384, disk_tokens=65_536, disk_gb_s=1.0, disk_base_s=0.02)


def test_what_left_the_host_memory_is_loaded_from_the_disk() -> None:
    """Host memory has room for one of the prompts."""
    asked = [alike(0, 8_000), alike(2, 16_368, 100), alike(4, 16_368, 200), alike(6, 8_000)]
    virtual, (*_, last) = run(DISK, asked)
    _, (*_, cached) = run(HOST._replace(cache_tokens=65_536), asked)
    assert (last.cached_tokens, cached.cached_tokens) == (7_984, 7_984)
    assert last.ttft is not None
    assert cached.ttft is not None
    assert last.ttft == pytest.approx(cached.ttft + 0.02 + 10 * 7_984 / TOKENS_S, abs=1e-3)
    assert (blocks(virtual, Tier.CPU), blocks(virtual, Tier.DISK)) == (1_024, 8_000 // 16 + 1_023 + 499)


def test_what_is_in_two_tiers_is_loaded_from_both() -> None:
    """The second prompt pushes half of the first one, its tail, out of host memory, and all of it out of the cache."""
    asked = [alike(0, 8_000), alike(2, 16_368, 100), alike(4, 8_000)]
    settings = DISK._replace(host_tokens=16_368 + 4_000, disk_gb_s=2.0)
    _, (_, _, third) = run(settings, asked)
    _, (_, _, cached) = run(HOST._replace(cache_tokens=65_536), asked)
    assert third.ttft is not None
    assert cached.ttft is not None
    loads = 0.01 + 4_000 / TOKENS_S + 0.02 + 5 * 3_984 / TOKENS_S
    assert third.ttft == pytest.approx(cached.ttft + loads, abs=1e-3)


def test_the_disk_loses_what_is_least_recently_used() -> None:
    asked = [alike(2 * at, 16_000, 100 * at) for at in range(7)]
    virtual, samples = run(DISK, [*asked, alike(14, 16_000, 300), alike(16, 16_000), alike(18, 16_000, 300)])
    assert [sample.cached_tokens for sample in samples[-3:]] == [15_984, 0, 15_984]
    assert blocks(virtual, Tier.DISK) == DISK.disk_tokens // 16


def test_a_lost_worker_takes_its_memory_with_it() -> None:
    virtual = VirtualFleet(HOST._replace(workers=2), find_policy("auto"))
    asked = [alike(at, 8_000, 100 * at) for at in range(8)]
    virtual.timeline.call_at(3.01, virtual.kill, 0)
    samples = virtual.run(asked)
    assert {sample.fate for sample in samples} <= {"answered", "failed"}
    assert virtual.index.blocks(virtual.ranks[0], Tier.CPU) == 0
    assert virtual.index.blocks(virtual.ranks[1], Tier.CPU) > 0


def test_what_a_lost_worker_still_had_to_tell_is_not_believed() -> None:
    (sample,) = VirtualFleet(HOST._replace(workers=2), find_policy("auto")).run([alike(0, 8_000)])
    assert sample.first is not None
    for later, told in ((0.008, 0), (0.0105, 0), (0.013, 500)):  # copied after 9 ms, told 3 ms later
        virtual = VirtualFleet(HOST._replace(workers=2), find_policy("auto"))
        virtual.timeline.call_at(sample.first + later, virtual.kill, sample.worker)
        seen: list[int] = []
        virtual.timeline.call_at(sample.first + later, lambda: seen.append(blocks(virtual, Tier.CPU)))  # noqa: B023
        virtual.run([alike(0, 8_000)])
        virtual.timeline.run(sample.first + 1)
        assert (seen, blocks(virtual, Tier.CPU)) == ([told], 0)


def test_without_events_nothing_is_known_of_it() -> None:
    virtual, (_, _, third) = run(
        HOST._replace(kv_events=False), [alike(0, 8_000), alike(2, 16_000, 100), alike(4, 8_000)]
    )
    assert blocks(virtual, Tier.CPU) == 0
    assert third.cached_tokens == 7_984


@pytest.mark.parametrize("gb_s", [2.0, 25.0])
def test_auto_is_not_misled_by_a_slow_tier(gb_s: float) -> None:
    """Were loads taken for computing, workers that load would look slow."""
    fleet = FleetSettings(cache_tokens=131_072, host_tokens=1_048_576, host_gb_s=gb_s)
    ours, best = (
        Run(Requests("long-documents", duration=100), fleet, policy, 0, 0.7).figures() for policy in ("auto", "lmetric")
    )
    assert ours.ttft.mean < 0.9 * best.ttft.mean  # 0.96 then, at 2 GB/s
