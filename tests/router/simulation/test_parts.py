"""Prefill and decode workers in virtual time: nothing is lost, nothing stays, and streams do not stop."""

from __future__ import annotations

import pytest

from indexer.types import Tier, WorkerRank
from router.ab.trace import Row
from router.scheduling.auto import Auto
from router.scheduling.cheapest import Cheapest
from router.simulation.arrival import Sample
from router.simulation.figures import counted_spread
from router.simulation.fleet import FleetSettings, VirtualFleet
from router.simulation.parts import HOP
from router.simulation.source import Requests

PUSH = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


def rows(seconds: float, rate: float = 1.0) -> list[Row]:
    return Requests(workload="chat", duration=seconds).rows(0, rate)


def fleet(prefill: int, decode: int, push: bool = False, workers: int = 8) -> VirtualFleet:
    settings = FleetSettings(workers=workers, prefill=prefill, decode=decode, push=push, cache_tokens=65_536)
    return VirtualFleet(settings, Cheapest(Auto()))


def fates(samples: list[Sample]) -> set[str]:
    return {sample.fate for sample in samples}


def nothing_stays(virtual: VirtualFleet) -> None:
    now = virtual.timeline.now()
    virtual.timeline.run(now + 1)
    for rank, worker in virtual.workers.items():
        engine = worker.scheduler
        assert (len(engine.running), len(engine.waiting), len(engine.loading), engine.kept) == (0, 0, 0, 0)
        assert virtual.scheduler.book.load(rank, now + 60).requests == 0
    assert not virtual.fetching
    assert not any(virtual._sent.values())


@PUSH
@pytest.mark.parametrize(("prefill", "decode"), [(4, 4), (1, 7), (7, 1), (4, 0), (2, 3)])
def test_every_request_is_answered_whatever_the_roles(prefill: int, decode: int, push: bool) -> None:
    virtual = fleet(prefill, decode, push)
    asked = rows(6)
    samples = virtual.run(asked)
    assert len(samples) == len(asked)
    assert fates(samples) == {"answered"}
    nothing_stays(virtual)


@PUSH
def test_with_strict_roles_prompts_are_computed_here_and_answers_made_there(push: bool) -> None:
    virtual = fleet(4, 4, push)
    samples = virtual.run(rows(6))
    assert {sample.worker for sample in samples} <= {0, 1, 2, 3}
    counters = [worker.scheduler.counters for worker in virtual.workers.values()]
    assert all(one.generated_tokens == one.finished_requests for one in counters[:4]), "one token for each prompt"
    assert all(one.transferred_tokens > 0 for one in counters[4:])
    answers = sum(sample.output_tokens for sample in samples)
    assert sum(one.generated_tokens for one in counters[4:]) == answers


@PUSH
@pytest.mark.parametrize("number", [0, 1, 2, 5], ids=["prefill", "prefill 1", "prefill 2", "decode"])
@pytest.mark.parametrize("at", [3.0, 3.01, 3.3])
def test_a_worker_that_dies_loses_only_what_had_begun_to_be_answered(number: int, at: float, push: bool) -> None:
    virtual = fleet(3, 3, push, workers=6)
    asked = rows(6, rate=2.0)

    def during(running: VirtualFleet) -> None:
        running.timeline.call_at(at, running.kill, number)

    samples = virtual.run(asked, during)
    assert len(samples) == len(asked)
    lost = [sample for sample in samples if sample.fate != "answered"]
    assert all(sample.first is not None for sample in lost)
    assert number >= 3 or not lost
    nothing_stays(virtual)


@PUSH
@pytest.mark.parametrize("number", range(4))
def test_a_worker_that_dies_before_its_half_arrives_leaves_none_of_the_other(number: int, push: bool) -> None:
    """The router does not know yet when it sends, and sends again while the other half is still on its way."""
    virtual = fleet(2, 2, push, workers=4)
    row, *_ = rows(5)

    def during(running: VirtualFleet) -> None:
        running.timeline.call_at(row.timestamp / 1000 - HOP / 2, running.kill, number)

    assert fates(virtual.run([row], during)) == {"answered"}
    nothing_stays(virtual)


def test_a_second_attempt_does_not_hear_of_the_first_ones_token() -> None:
    """When its decode worker dies, it goes to the same prefill worker, whose step still computes the first one."""

    def ttft(dying: int | None) -> float:
        virtual = fleet(1, 2, push=True, workers=3)

        def during(running: VirtualFleet) -> None:
            if dying is not None:
                running.timeline.call_at(1.05, running.kill, dying)

        (sample,) = virtual.run([Row(1000, 4096, 3, tuple(range(8)))], during)
        nothing_stays(virtual)
        assert sample.ttft is not None
        return sample.ttft

    another_step = FleetSettings().timing.base_s
    assert max(ttft(1), ttft(2)) > ttft(None) + another_step


@pytest.mark.parametrize("number", [0, 1], ids=["prefill", "decode"])
def test_a_worker_that_drains_finishes_its_part(number: int) -> None:
    virtual = fleet(1, 1, workers=2)
    row, *_ = rows(5)

    def during(running: VirtualFleet) -> None:
        running.timeline.call_at(row.timestamp / 1000 + 2 * HOP, running.drain, number)

    assert fates(virtual.run([row], during)) == {"answered"}
    assert [worker.scheduler.counters.aborted_requests for worker in virtual.workers.values()] == [0, 0]
    nothing_stays(virtual)


def test_workers_of_a_role_may_all_go_and_come_back() -> None:
    """Those that do both serve meanwhile."""
    virtual = fleet(1, 1, workers=3)

    def during(running: VirtualFleet) -> None:
        running.timeline.call_at(2.0, running.kill, 0)
        running.timeline.call_at(4.0, running.kill, 1)

    asked = rows(8, rate=0.5)
    samples = virtual.run(asked, during)
    assert [sample.fate for sample in samples if sample.first is None] == []
    assert {sample.worker for sample in samples if sample.arrived > 4} == {2}
    nothing_stays(virtual)


def test_streams_stop_less_where_prompts_are_computed_elsewhere() -> None:
    asked = Requests(workload="rag", duration=20).rows(0, 1.2)

    def measured(prefill: int) -> tuple[float, float]:
        """99th percentile of the time between two tokens, and mean TTFT."""
        virtual = VirtualFleet(FleetSettings(workers=8, prefill=prefill, push=True), Cheapest(Auto()))
        ttfts = [sample.ttft for sample in virtual.run(asked) if sample.ttft is not None]
        return counted_spread(virtual.token_gaps).p99, sum(ttfts) / len(ttfts)

    (mixed, mixed_ttft), (apart, ttft) = measured(0), measured(4)
    assert apart <= 0.2 * mixed
    assert ttft <= 1.6 * mixed_ttft


def test_the_caches_of_all_idle_decode_workers_are_used() -> None:
    """Eight prompts that come again and again fit into four of them, and not into one."""
    settings = FleetSettings(workers=6, prefill=2, decode=4, cache_tokens=20_000)
    virtual = VirtualFleet(settings, Cheapest(Auto()))
    prompts = [[number * 10 + block for block in range(8)] for number in range(8)]
    asked = [Row(600 * number, 4097, 20, (*prompts[number % 8], 1000 + number)) for number in range(48)]
    assert fates(virtual.run(asked)) == {"answered"}
    moved = sum(worker.scheduler.counters.transferred_tokens for worker in virtual.workers.values())
    assert moved <= 8 * 4097 + 40 * 512, "each prompt once, and the end of its last block"


def test_the_rank_that_decodes_holds_the_prompt_afterwards() -> None:
    virtual = fleet(1, 1, workers=2)
    row = rows(5)[0]
    virtual.run([row])
    for number in (0, 1):
        assert virtual.index.blocks(WorkerRank(f"worker-{number:04}", 0), Tier.GPU) >= row.input_length // 16
