"""Which charts a comparison is shown in (pure): curves over rates where there are several, bars where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from router.page.results import HITS, IN_TIME, TPOT_MEAN, TTFT_MEAN, TTFT_P99, Comparison, Result
from router.page.svg import WIDE, Axis, Line, Point, bar_chart, line_chart

_QUANTILES = 100
"""Points of a distribution's curve."""


class _Charted(NamedTuple):
    figure: str
    title: str
    unit: str


_CHARTED = (
    _Charted(TTFT_MEAN, "Time to first token, mean", "seconds"),
    _Charted(TTFT_P99, "Time to first token, 99th percentile", "seconds"),
    _Charted(TPOT_MEAN, "Time per output token, mean", "milliseconds"),
    _Charted(HITS, "Prompt tokens found cached", "%"),
    _Charted(IN_TIME, "Requests within the TTFT objective", "%"),
)


class Chart(NamedTuple):
    title: str
    svg: str
    note: str = ""


class Group(NamedTuple):
    title: str
    charts: Sequence[Chart]


def groups(comparison: Comparison) -> list[Group]:
    several = len(comparison.rates) > 1
    shown = [_by_rate(comparison, charted) for charted in _CHARTED if comparison.has(charted.figure)]
    found = [Group("By rate" if several else "At a glance", shown)]
    for rate in comparison.rates:
        title = f"Within runs at rate {rate:g}" if several else "In detail"
        found.append(Group(title, [*_distributions(comparison, rate), *_balance(comparison, rate)]))
    return [group for group in found if group.charts]


def _by_rate(comparison: Comparison, charted: _Charted) -> Chart:
    lines = [
        Line(policy, colour, [_point(comparison, charted, policy, rate) for rate in comparison.rates])
        for colour, policy in enumerate(comparison.policies)
    ]
    if len(comparison.rates) == 1:
        form = next(figure.form for figure in comparison.figures if figure.title == charted.figure)
        return Chart(charted.title, bar_chart(charted.title, charted.unit, form, lines))
    x, y = Axis(comparison.rate_unit), Axis(charted.unit, low=0.0)
    return Chart(charted.title, line_chart(charted.title, x, y, lines))


def _point(comparison: Comparison, charted: _Charted, policy: str, rate: float) -> Point:
    """Its interval ends where values must: Student's t does not know that there is nothing below 0 or above 100 %."""
    interval = comparison.mean(charted.figure, policy, rate)
    low = None if interval.low is None else max(0.0, interval.low)
    most = 100.0 if charted.unit == "%" else math.inf
    return Point(rate, interval.mean, low, None if interval.high is None else min(interval.high, most))


def _distributions(comparison: Comparison, rate: float) -> Iterator[Chart]:
    lines = _lines(comparison, [_distribution(comparison.of(policy, rate)) for policy in comparison.policies])
    if lines:
        title = "Distribution of time to first token"
        svg = line_chart(title, Axis("seconds", log=True), Axis("requests answered", 0.0, unit="%"), lines, WIDE)
        seeds = ", all seeds together" if len(comparison.seeds) > 1 else ""
        yield Chart(title, svg, f"Share of requests{seeds}; further left is better.")


def _balance(comparison: Comparison, rate: float) -> Iterator[Chart]:
    lines = _lines(comparison, [_over_time(comparison.of(policy, rate)) for policy in comparison.policies])
    if lines:
        title = "Imbalance over time"
        svg = line_chart(title, Axis("seconds", 0.0), Axis("busiest / mean", 1.0), lines, WIDE)
        seed = f", seed {comparison.seeds[0]}" if len(comparison.seeds) > 1 else ""
        yield Chart(title, svg, f"Prompt tokens to compute, window by window{seed}; 1 is even.")


def _lines(comparison: Comparison, points: Sequence[Sequence[Point]]) -> list[Line]:
    named = zip(comparison.policies, points, strict=True)
    return [Line(policy, colour, line) for colour, (policy, line) in enumerate(named) if line]


def _distribution(results: Sequence[Result]) -> list[Point]:
    ordered = sorted(value for result in results for value in result.ttft if value > 0)
    if not ordered:
        return []
    shares = [step / _QUANTILES for step in range(_QUANTILES + 1)]
    return [Point(ordered[max(0, math.ceil(share * len(ordered)) - 1)], share * 100) for share in shares]


def _over_time(results: Sequence[Result]) -> list[Point]:
    return [Point(at, value) for at, value in results[0].imbalance] if results else []
