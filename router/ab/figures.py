"""The numbers that a report shows of a mode, and their formats (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from router.ab.statistics import Spread, Summary
from router.page.results import HITS, IN_TIME, Figure


class Line(msgspec.Struct, frozen=True):
    figure: Figure
    value: Callable[[Summary], float]


def _line(title: str, value: Callable[[Summary], float], form: str = "{:.3f}", *, compared: bool = True) -> Line:
    return Line(Figure(title, form, compared), value)


def _spread(title: str, of: Callable[[Summary], Spread], cuts: Sequence[str], form: str, factor: float) -> list[Line]:
    def line(cut: str) -> Line:
        return _line(f"{title} {cut}", lambda summary: getattr(of(summary), cut) * factor, form)

    return [line(cut) for cut in cuts]


LINES: tuple[Line, ...] = (
    _line("requests", lambda s: s.requests, "{:,.0f}", compared=False),
    _line("errors", lambda s: s.errors, "{:,.0f}", compared=False),
    *_spread("TTFT s", lambda s: s.ttft, ("mean", "p50", "p90", "p99"), "{:.3f}", 1),
    *_spread("TPOT ms", lambda s: s.tpot, ("mean", "p50", "p99"), "{:.1f}", 1000),
    *_spread("E2E s", lambda s: s.e2e, ("mean", "p50", "p99"), "{:.2f}", 1),
    _line(HITS, lambda s: s.hit_ratio * 100, "{:.1f}"),
    _line("imbalance, uncached tokens", lambda s: s.imbalance_prefill, "{:.2f}", compared=False),
    _line("imbalance, requests", lambda s: s.imbalance_requests, "{:.2f}", compared=False),
    _line("output tokens / s", lambda s: s.output_tokens_per_second, "{:,.0f}"),
    _line("requests / s", lambda s: s.requests_per_second, "{:.2f}"),
    _line("generator lag p99 s", lambda s: s.lag_p99, "{:.4f}", compared=False),
)
IN_TIME_LINES: tuple[Line, ...] = (
    _line(IN_TIME, lambda s: s.in_time * 100, "{:.1f}"),
    _line("goodput, requests / s", lambda s: s.goodput, "{:.2f}"),
)
"""Figures shown only where there is an objective for TTFT."""


def values(summary: Summary) -> dict[str, float]:
    """The values of all figures, by title."""
    return {line.figure.title: line.value(summary) for line in (*LINES, *IN_TIME_LINES)}


def ratios(summary: Summary, baseline: Summary) -> dict[str, float | None]:
    """The ratios of all compared figures to the baseline's."""
    here, there = values(summary), values(baseline)
    compared = (line.figure.title for line in (*LINES, *IN_TIME_LINES) if line.figure.compared)
    return {title: _ratio(title, here, there) for title in compared}


def _ratio(title: str, here: Mapping[str, float], there: Mapping[str, float]) -> float | None:
    value, base = here[title], there[title]
    return value / base if base and not math.isnan(value) and not math.isnan(base) else None
