"""The table of a page (pure): a row for each rate and policy, a column for each figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from router.page.intervals import Interval
from router.page.results import Comparison, Figure
from router.page.svg import COLOURS


def table(comparison: Comparison) -> str:
    shown = [figure for figure in comparison.figures if comparison.has(figure.title)]
    head = "".join(f'<th scope="col">{escape(figure.title)}</th>' for figure in shown)
    busy = any(result.busy for result in comparison.results)
    head += '<th scope="col">machine busy, of it this run %</th>' if busy else ""
    groups = "".join(_group(comparison, shown, rate, busy) for rate in comparison.rates)
    return f'<table><thead><tr><th scope="col">policy</th>{head}</tr></thead>{groups}</table>'


def _group(comparison: Comparison, shown: Sequence[Figure], rate: float, busy: bool) -> str:
    title = ""
    if len(comparison.rates) > 1:
        span = len(shown) + 1 + busy
        title = f'<tr><th class="rate" colspan="{span}" scope="rowgroup">rate {rate:g}</th></tr>'
    rows = "".join(
        _row(comparison, shown, rate, policy, busy) for policy in comparison.policies if comparison.of(policy, rate)
    )
    return f"<tbody>{title}{rows}</tbody>"


def _row(comparison: Comparison, shown: Sequence[Figure], rate: float, policy: str, busy: bool) -> str:
    colour = comparison.policies.index(policy)
    cells = "".join(_cell(comparison, figure, policy, rate) for figure in shown)
    if busy:
        cells += f"<td>{_busy(comparison, policy, rate)}</td>"
    return f'<tr><th scope="row">{key(policy, colour)}</th>{cells}</tr>'


def key(policy: str, colour: int) -> str:
    """A policy's name with its colour before it."""
    return f'<span class="key"><i class="c{colour % COLOURS}"></i>{escape(policy)}</span>'


def _cell(comparison: Comparison, figure: Figure, policy: str, rate: float) -> str:
    value = comparison.mean(figure.title, policy, rate)
    if math.isnan(value.mean):
        return "<td>–</td>"
    spread = "" if not value.half else f" <small>±{figure.form.format(value.half)}</small>"
    ratio = ""
    if figure.compared and policy != comparison.baseline:
        ratio = _ratio(comparison.ratio(figure.title, policy, rate))
    return f"<td>{figure.form.format(value.mean)}{spread}{ratio}</td>"


def _ratio(ratio: Interval) -> str:
    """What an interval that does not hold 1 says is hardly chance: it is set in bold."""
    if math.isnan(ratio.mean):
        return ""
    text = f"{ratio.mean:.2f}×"
    if ratio.low is not None and ratio.high is not None:
        sure = not ratio.low <= 1 <= ratio.high
        text = (f"<b>{text}</b>" if sure else text) + f" ({ratio.low:.2f}–{ratio.high:.2f})"
    return f'<div class="ratio">{text}</div>'


def _busy(comparison: Comparison, policy: str, rate: float) -> str:
    """Of the busiest of its runs."""
    shares = [result.busy for result in comparison.of(policy, rate) if result.busy]
    return "{:.0f}, {:.0f}".format(*(share * 100 for share in max(shares))) if shares else "–"
