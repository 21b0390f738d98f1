"""Measures what knowing the content of the shared store gains the router, for stores of several speeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Final

import msgspec
from rich.table import Table

from router.page.intervals import ratio_interval
from router.simulation.figures import Figures
from router.simulation.plan import Plan
from router.simulation.run import Run, Runner

GOAL: Final = 0.75
"""The ratio of mean TTFTs, with credit to without, to be reached at the store speed where it is best."""
GOAL_WORST: Final = 1.02
"""The ratio that must not be exceeded at any store speed."""


class Line(msgspec.Struct, frozen=True):
    """The results of one policy at one store speed, one for each seed: without and with credit for stored tokens."""

    gb_s: float
    policy: str
    without: tuple[Figures, ...]
    told: tuple[Figures, ...]

    @property
    def ratio(self) -> float:
        """The ratio of mean TTFTs, with credit to without."""
        return ratio_interval(_means(self.told), _means(self.without)).mean


def run_credit(plan: Plan, runs: Runner) -> Iterator[Line]:
    """Runs all policies, seeds and store speeds of the plan at its first rate."""
    asked = [(gb_s, policy) for gb_s in plan.store_sweep for policy in plan.policies]
    found = runs(
        _run(plan, gb_s, policy, seed, credit)
        for gb_s, policy in asked
        for credit in (False, True)
        for seed in plan.seeds
    )
    for gb_s, policy in asked:
        without = tuple(next(found) for _ in plan.seeds)
        yield Line(gb_s, policy, without, tuple(next(found) for _ in plan.seeds))


def _run(plan: Plan, gb_s: float, policy: str, seed: int, credit: bool) -> Run:
    run = plan.run(policy, seed, plan.rates[0])
    return run._replace(fleet=run.fleet._replace(store_gb_s=gb_s, store_credit=credit))


def credit_table(lines: Sequence[Line]) -> Table:
    grid = Table(
        title="Mean TTFT in virtual seconds; prompt tokens from own caches and from the store", title_justify="left"
    )
    for head in ("GB/s", "policy", "without credit", "own + store %", "with credit", "own + store %", "ratio"):
        grid.add_column(head, justify="left" if head == "policy" else "right")
    for line in lines:
        sides = [cell for side in (line.without, line.told) for cell in (f"{fmean(_means(side)):.3f}", _hits(side))]
        grid.add_row(f"{line.gb_s:g}", line.policy, *sides, f"{line.ratio:.3f}")
    return grid


def credit_verdicts(lines: Sequence[Line]) -> list[str]:
    """The two ratios judged, each with its goal."""
    ratios = [line.ratio for line in lines]
    return [
        f"with/without credit, best speed: {min(ratios):.3f}, goal {GOAL}",
        f"with/without credit, worst speed: {max(ratios):.3f}, goal {GOAL_WORST}",
    ]


def _means(side: Sequence[Figures]) -> list[float]:
    return [figures.ttft.mean for figures in side]


def _hits(side: Sequence[Figures]) -> str:
    own, store = fmean(one.hit_ratio for one in side), fmean(one.store_ratio or 0.0 for one in side)
    return f"{own * 100:.1f} + {store * 100:.1f}"
