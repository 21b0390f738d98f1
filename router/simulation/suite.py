"""Runs every workload below and above its knee, and compares the policy `auto` with the best baseline.

Two figures judge a policy: the mean of auto/best over the saturated runs, and the worst of all runs. "Best" is
whichever baseline is best in that run, so that no choice of workloads favours the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Final, NamedTuple, TypeAlias

from router.simulation.figures import Figures
from router.simulation.fleet import FleetSettings
from router.simulation.knee import Knee
from router.simulation.plan import BASELINES
from router.simulation.run import Run, Runner
from router.simulation.source import Requests
from router.simulation.workloads import WORKLOADS

LOADS: Final = (0.6, 0.9, 1.1)
"""Request rates, as multiples of the knee."""
SATURATED: Final = 0.9
"""The least of these loads at which requests wait for each other."""
GOAL_SATURATED: Final = 0.85
GOAL_WORST: Final = 1.05
GOAL_NO_REUSE: Final = 1.02
"""Goals for the three fields of `Verdict`; docs/simulate.md has them, too."""
JUDGED: Final = "auto"
CONTROL: Final = "no-reuse"
CONTROL_POLICY: Final = "least-loaded"
STANDS_FOR_A_KNEE: Final = 2.0
"""The rate, as a multiple of the nominal one, used in place of a knee for a workload that has none."""


class Case(NamedTuple):
    workload: str
    seconds: float
    """The length of the trace, in its own time, chosen so that a run takes seconds."""
    knee: float
    """The knee, as a multiple of the nominal rate."""
    saturates: bool = True
    """False where so short a trace makes no queues at any rate, and so has no knee: twice the nominal rate, which is
    about what the fleet can sustain, is used instead."""

    def run(self, policy: str, seed: int, rate: float) -> Run:
        kind = WORKLOADS[self.workload]
        fleet = FleetSettings(workers=kind.workers, cache_tokens=kind.cache_tokens, slow=kind.slow)
        return Run(Requests(self.workload, duration=self.seconds), fleet, policy, seed, rate)

    @property
    def policies(self) -> tuple[str, ...]:
        more = (CONTROL_POLICY,) if self.workload == CONTROL else ()
        return (JUDGED, *BASELINES, *more)


# The knees were found by `python -m router simulate --suite --knee --seeds 0,1`; docs/simulate.md says what a knee is.
# Where `saturates=False` it found none up to 16 times the nominal rate.
CASES: Final = (
    Case("chat", 80.0, 5.6),
    Case("long-documents", 200.0, 1.11),
    Case("agents", 120.0, 4.57),
    Case("hot-prompt", 45.0, 4.57),
    Case("no-reuse", 60.0, 3.05),
    Case("bursts", 80.0, 3.05),
    Case("mixed-hardware", 50.0, 10.29),
    Case("batch-few-shot", 8.0, 1.11),
    Case("large-fleet", 12.0, 2.0, saturates=False),
    Case("huge-fleet", 2.5, 2.0, saturates=False),
    Case("small-caches", 150.0, 3.05),
    Case("big-caches", 200.0, 8.4),
    Case("tree-search", 80.0, 10.29),
    Case("rag", 70.0, 2.49),
    Case("long-answers", 90.0, 2.0, saturates=False),
)


def cases(names: Sequence[str] = ()) -> list[Case]:
    """All cases, or those of the workloads named."""
    return [case for case in CASES if not names or case.workload in names]


Of: TypeAlias = Callable[[Figures], float]
"""A figure of a run; less is better."""


class Line(NamedTuple):
    """The results of one workload at one load: by policy, one for each seed."""

    workload: str
    load: float
    rate: float
    figures: dict[str, list[Figures]]
    saturated: bool = False
    """Whether there is a knee, and the load is at least 0.9 of it."""

    def mean(self, policy: str, of: Of) -> float:
        return fmean(of(figures) for figures in self.figures[policy])

    def best(self, of: Of) -> str:
        return min(BASELINES, key=lambda policy: self.mean(policy, of))

    def ratio(self, of: Of) -> float:
        return self.mean(JUDGED, of) / self.mean(self.best(of), of)

    @property
    def control(self) -> float | None:
        if CONTROL_POLICY not in self.figures:
            return None
        return self.mean(JUDGED, ttft_mean) / self.mean(CONTROL_POLICY, ttft_mean)


def ttft_mean(figures: Figures) -> float:
    return figures.ttft.mean


def ttft_p99(figures: Figures) -> float:
    return figures.ttft.p99


def tpot_mean(figures: Figures) -> float:
    return figures.tpot.mean


def e2e_mean(figures: Figures) -> float:
    return figures.e2e.mean


class Verdict(NamedTuple):
    """The figures judged; each has a goal that it must not exceed."""

    saturated: float
    """The mean ratio auto/best of mean TTFTs at 0.9 and 1.1 of the knee, over workloads that have one."""
    worst: float
    """The highest ratio auto/best of all runs."""
    no_reuse: float
    """The highest ratio auto/least-loaded on the workload that shares no prefixes."""


def judge(lines: Sequence[Line]) -> Verdict:
    saturated = [line.ratio(ttft_mean) for line in lines if line.saturated]
    control = [line.control for line in lines if line.control is not None]
    return Verdict(
        fmean(saturated) if saturated else math.nan,
        max(line.ratio(ttft_mean) for line in lines),
        max(control, default=math.nan),
    )


def run_suite(chosen: Sequence[Case], seeds: Sequence[int], runs: Runner) -> Iterator[Line]:
    """Yields each line as soon as its runs are done."""
    asked = [
        (case, load, policy, seed) for case in chosen for load in LOADS for policy in case.policies for seed in seeds
    ]
    found = runs(case.run(policy, seed, load * case.knee) for case, load, policy, seed in asked)
    for case in chosen:
        for load in LOADS:
            figures = {policy: [next(found) for _ in seeds] for policy in case.policies}
            saturated = case.saturates and load >= SATURATED
            yield Line(case.workload, load, load * case.knee, figures, saturated)


def find_knees(
    chosen: Sequence[Case], seeds: Sequence[int], runs: Runner, say: Callable[[str], None]
) -> Iterator[Case]:
    """The cases, with knees found again by simulation."""
    for case in chosen:
        say(case.workload)
        knee = Knee(case.run, BASELINES, seeds, runs, say).find()
        yield case._replace(knee=knee or STANDS_FOR_A_KNEE, saturates=knee is not None)
