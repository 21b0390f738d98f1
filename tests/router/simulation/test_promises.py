"""What the policy `auto` and admission promise, in virtual time: deterministic by seed, whatever the machine does."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import pytest

from engines.sim.timing import StepTiming
from router.ab.trace import BLOCK_TOKENS, Row
from router.scheduling.admission import Admission, Objectives
from router.scheduling.auto import Auto
from router.scheduling.balance import LeastLoaded
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import Policy
from router.scheduling.lmetric import LMetric
from router.scheduling.queue import Queue
from router.scheduling.waiting import Waiting
from router.simulation.arrival import Sample
from router.simulation.fleet import FleetSettings, VirtualFleet
from router.simulation.workloads import WORKLOADS

NO_REUSE = WORKLOADS["no-reuse"]
COARSE = FleetSettings(workers=NO_REUSE.workers, cache_tokens=NO_REUSE.cache_tokens, block_size=64)
NEVER = Admission()


def rows(rate: float, seconds: float, seed: int = 1) -> list[Row]:
    """So many seconds at `rate` times the workload's nominal one."""
    return faster(NO_REUSE.rows(seed, seconds * rate), rate)


def faster(trace: Sequence[Row], rate: float) -> list[Row]:
    return [Row(row.timestamp / rate, row.input_length, row.output_length, row.hash_ids) for row in trace]


def after(trace: Sequence[Row], seconds: float) -> list[Row]:
    return [Row(row.timestamp + seconds * 1000, row.input_length, row.output_length, row.hash_ids) for row in trace]


def auto() -> Policy:
    return Cheapest(Auto())


def run(policy: Policy, trace: Sequence[Row], admission: Admission = NEVER) -> list[Sample]:
    return VirtualFleet(COARSE, policy, 0, admission).run(trace)


def mean_ttft(samples: Sequence[Sample]) -> float:
    waits = [sample.ttft for sample in samples if sample.ttft is not None]
    return sum(waits) / len(waits)


def cached(samples: Sequence[Sample]) -> float:
    return sum(sample.cached_tokens for sample in samples) / sum(sample.prompt_tokens for sample in samples)


def share(samples: Sequence[Sample], worker: int, begin: float, end: float) -> float:
    """Of the prompt tokens computed for requests that arrived within those seconds."""
    within = [sample for sample in samples if begin <= sample.arrived < end]
    computed = [(sample.worker, sample.prompt_tokens - sample.cached_tokens) for sample in within]
    return sum(tokens for where, tokens in computed if where == worker) / sum(tokens for _, tokens in computed)


@pytest.mark.parametrize(("workload", "rate", "size"), [("small-caches", 1.5, None), ("agents", 2.5, 65_536)])
def test_without_events_a_cache_of_known_size_is_known_nearly_as_well(
    workload: str, rate: float, size: int | None
) -> None:
    """The second would take 1.7 times as long if all that was ever sent were believed in."""
    kind = WORKLOADS[workload]
    trace, settings = faster(kind.rows(1, 40 * rate), rate), COARSE._replace(cache_tokens=size or kind.cache_tokens)
    told, untold = (VirtualFleet(settings._replace(kv_events=heard), auto()).run(trace) for heard in (True, False))
    assert mean_ttft(untold) < 1.1 * mean_ttft(told)
    assert cached(untold) > 0.9 * cached(told)
    assert cached(told) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("slots", [4, 2])
def test_requests_do_not_wait_for_adapters_that_another_worker_runs(slots: int) -> None:
    """24 adapters on eight workers: each policy that does not look at them has all workers want all of them."""
    kind = WORKLOADS["adapters"]
    settings = COARSE._replace(workers=kind.workers, cache_tokens=kind.cache_tokens, max_loras=slots)
    trace = kind.rows(1, 60)
    ours, others = (mean_ttft(VirtualFleet(settings, policy).run(trace)) for policy in (auto(), Cheapest(LMetric())))
    assert ours < 0.1 * others


@pytest.mark.slow
def test_a_worker_made_three_times_slower_sheds_load_within_ten_seconds_and_gets_it_back() -> None:
    fleet = VirtualFleet(COARSE, auto())

    def change(fleet: VirtualFleet) -> None:
        fleet.timeline.call_at(40, fleet.slow_down, 3, 3.0)
        fleet.timeline.call_at(80, fleet.slow_down, 3, 1.0)

    samples = fleet.run(rows(1.2, 130), change)
    before, slow, recovered = share(samples, 3, 10, 40), share(samples, 3, 50, 80), share(samples, 3, 90, 130)
    assert before > 0.5 / COARSE.workers
    assert slow < 0.6 * before
    assert recovered > 0.8 / COARSE.workers


@pytest.mark.slow
def test_workers_that_are_alike_get_alike() -> None:
    """Else streams stall where the long prompts go, and all that was learned of workers is what they were given."""
    hot = WORKLOADS["hot-prompt"]
    fleet = VirtualFleet(FleetSettings(workers=hot.workers, cache_tokens=hot.cache_tokens, block_size=64), auto())
    samples = fleet.run(faster(hot.rows(1, 100), 1.6))
    assert hot.workers * max(share(samples, worker, 30, 63) for worker in range(hot.workers)) < 1.4


def shared_prefix(rate: float) -> list[Row]:
    """80 s of prompts of which 7,168 tokens are the same."""
    draw, blocks = random.Random(1), 7_168 // BLOCK_TOKENS
    common, at, trace = tuple(range(blocks)), 0.0, []
    for number in range(int(rate * 80)):
        at += draw.expovariate(rate)
        trace.append(Row(at * 1000, 7_168 + draw.randint(20, 200), 100, (*common, blocks + number)))
    return trace


def later(policy: Policy, trace: Sequence[Row], since: float, admission: Admission = NEVER) -> list[Sample]:
    """What came of all but the first seconds, on eight workers that take 1.4 s for `shared_prefix`."""
    slow = StepTiming(base_s=0.01, prefill_tokens_per_s=5_000.0, decode_s_per_sequence=0.0005)
    samples = VirtualFleet(FleetSettings(workers=8, block_size=64, timing=slow), policy, 0, admission).run(trace)
    return [sample for sample in samples if sample.arrived > since]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [12.0, 20.0])
def test_a_prefix_that_everybody_shares_is_soon_everywhere(rate: float) -> None:
    """To each request alone another copy is dear: 1.4 s of prefill instead of a step. All the same the first holders
    must not get everything while the others idle."""
    trace = shared_prefix(rate)
    ours, theirs = later(auto(), trace, 40.0), later(Cheapest(LMetric()), trace, 40.0)
    requests = Counter(sample.worker for sample in ours)
    assert min(requests[worker] for worker in range(8)) > 0.6 * len(ours) / 8
    assert mean_ttft(ours) <= 1.05 * mean_ttft(theirs)


def test_nobody_misses_an_objective_for_what_others_gain() -> None:
    samples = later(auto(), shared_prefix(20.0), 2.0, Admission(Objectives(ttft=1.0)))
    assert all(sample.ttft is not None and sample.ttft < 1.0 for sample in samples)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_where_nothing_recurs_auto_costs_nothing_against_the_least_loaded(rate: float) -> None:
    ours, theirs = (
        sum(mean_ttft(run(policy(), rows(rate, 40, seed))) for seed in (1, 2)) for policy in (auto, LeastLoaded)
    )
    assert ours <= 1.02 * theirs


@pytest.mark.parametrize("speed", [0.2, 1.0, 2.5, 20.0, 100.0])
def test_one_client_that_asks_slowly_has_the_caches_of_the_whole_fleet(speed: float) -> None:
    """Whether workers are quicker than the priors say or slower: nothing else ever waits, but what is asked again must
    not have been driven out while others have room."""
    prompt, prompts, workers = 4_000, 12, 4
    blocks = -(-prompt // BLOCK_TOKENS)
    trace = [
        Row(turn * 1_500, prompt, 4, tuple(range(turn % prompts * blocks, (turn % prompts + 1) * blocks)))
        for turn in range(6 * prompts)
    ]
    usual = StepTiming()
    times = {field.name: getattr(usual, field.name) / speed for field in fields(usual)}
    timing = StepTiming(**{**times, "prefill_tokens_per_s": speed * usual.prefill_tokens_per_s})
    settings = FleetSettings(workers=workers, cache_tokens=prompts // 2 * prompt, timing=timing)
    samples = VirtualFleet(settings, auto()).run(trace)
    again = samples[prompts:]
    assert sum(sample.cached_tokens for sample in again) > 0.9 * prompt * len(again)


SLO = 1.0


def goodput(samples: Sequence[Sample]) -> int:
    """Requests within the objective."""
    return sum(sample.ttft is not None and sample.ttft <= SLO for sample in samples)


def late(samples: Sequence[Sample]) -> int:
    """Requests that were answered, but not within it."""
    return sum(sample.ttft is not None and sample.ttft > SLO for sample in samples)


@pytest.mark.slow
def test_an_objective_makes_goodput_at_overload_and_clears_by_itself() -> None:
    trace = [*rows(5.0, 20), *after(rows(0.8, 15, seed=2), 20)]
    free, refusing = run(auto(), trace), run(auto(), trace, Admission(Objectives(ttft=SLO)))
    assert goodput(refusing) >= 1.5 * goodput(free)
    # A prompt that takes about as long as the objective by itself is refused wherever it would have to wait.
    refused = [sample.arrived for sample in refusing if sample.first is None and sample.prompt_tokens < 8_000]
    assert len(refused) > 50
    assert max(refused) < 20 + 5


def test_an_objective_is_kept_where_slots_are_what_is_short() -> None:
    """A worker that runs eight requests at a time has hardly any prefill queued, however many wait for a slot."""
    kind, rate = WORKLOADS["chat"], 2.5
    trace, few = faster(kind.rows(1, 20 * rate), rate), COARSE._replace(max_num_seqs=8)
    free, refusing = (
        VirtualFleet(few, auto(), 0, admission).run(trace) for admission in (NEVER, Admission(Objectives(ttft=SLO)))
    )
    assert goodput(refusing) >= 1.5 * goodput(free)
    assert late(refusing) < 0.1 * goodput(refusing)


@pytest.mark.slow
def test_an_objective_is_kept_where_memory_is_what_is_short() -> None:
    """Answers grow until an engine takes memory back from the last request that it began. That one waits, and seems to
    have left room for others."""
    trace, small = WORKLOADS["long-answers"].rows(0, 240), COARSE._replace(workers=2, cache_tokens=100_000)
    samples = VirtualFleet(small, auto(), 0, Admission(Objectives(ttft=SLO))).run(trace)
    assert goodput(samples) > 0.48 * len(samples)
    assert late(samples) < 0.03 * goodput(samples)


@pytest.mark.slow
def test_quick_workers_get_no_more_than_they_can_run() -> None:
    """By their steps alone, those that are twice as quick would get sixteen times as many answers to decode."""
    kind, rate = WORKLOADS["long-answers"], 0.9
    trace = faster(kind.rows(0, 60 * rate), rate)
    few = COARSE._replace(max_num_seqs=16, slow={1: 2.0, 4: 2.0, 6: 2.0})
    ours, theirs = (VirtualFleet(few, policy).run(trace) for policy in (auto(), Cheapest(LMetric())))
    assert mean_ttft(ours) <= 1.05 * mean_ttft(theirs)


def test_a_refusal_costs_less_than_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CPU time: the look-up, the choice and the verdict, in the middle of an overload."""
    fleet = VirtualFleet(COARSE, auto(), 0, Admission(Objectives(ttft=1e-6)))
    took = list[float]()

    class Timed:
        def __init__(self, queue: Queue) -> None:
            self._queue = queue

        def submit(self, waiting: Waiting) -> None:
            began = time.process_time()
            self._queue.submit(waiting)
            took.append(time.process_time() - began)

        def __getattr__(self, name: str) -> object:
            return getattr(self._queue, name)

    monkeypatch.setattr(fleet, "queue", Timed(fleet.queue))
    samples = fleet.run(rows(3.0, 10))
    assert sum(sample.first is None for sample in samples) > 0.9 * len(took)
    assert sorted(took)[len(took) // 2] < 1e-3
