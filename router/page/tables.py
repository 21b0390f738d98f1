"""The table of a page (pure): a row for each figure, a column for each policy, one part for each rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from router.page.intervals import Interval, ratio_text
from router.page.results import BUSY, Comparison, Figure
from router.page.svg import colour_class


def table(comparison: Comparison) -> str:
    names = enumerate(comparison.policies)
    head = "".join(f'<th scope="col">{key(policy, colour)}</th>' for colour, policy in names)
    parts = "".join(_part(comparison, rate) for rate in comparison.rates)
    return f"<table><thead><tr><th></th>{head}</tr></thead>{parts}</table>"


def _part(comparison: Comparison, rate: float) -> str:
    shown = [figure for figure in comparison.figures if comparison.has(figure.title)]
    rows = [
        _row(figure.title, [_cell(comparison, figure, policy, rate) for policy in comparison.policies])
        for figure in shown
    ]
    if any(result.busy for result in comparison.results):
        rows.append(_row(BUSY, [comparison.busy(policy, rate) for policy in comparison.policies]))
    span = len(comparison.policies) + 1
    title = f'<tr><th class="rate" colspan="{span}" scope="rowgroup">rate {rate:g}</th></tr>'
    return f"<tbody>{title if len(comparison.rates) > 1 else ''}{''.join(rows)}</tbody>"


def _row(title: str, cells: Sequence[str]) -> str:
    return f'<tr><th scope="row">{escape(title)}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def key(policy: str, colour: int) -> str:
    """A policy's name with its colour before it."""
    return f'<span class="key"><i class="{colour_class(colour)}"></i>{escape(policy)}</span>'


def _cell(comparison: Comparison, figure: Figure, policy: str, rate: float) -> str:
    value = comparison.mean(figure.title, policy, rate)
    if math.isnan(value.mean):
        return "–"
    spread = f" <small>±{figure.form.format(value.half)}</small>" if value.half else ""
    text = figure.form.format(value.mean) + spread
    if policy == comparison.baseline:
        return text
    ratio = _ratio(comparison.ratio(figure.title, policy, rate)) if figure.compared else ""
    return f'{text}<span class="ratio">{ratio}</span>'


def _ratio(ratio: Interval) -> str:
    """What an interval that does not hold 1 says is hardly chance: it is set in bold."""
    if math.isnan(ratio.mean):
        return ""
    text = f"{escape(ratio_text(ratio.mean))}×"
    if ratio.low is None or ratio.high is None:
        return text
    sure = not ratio.low <= 1 <= ratio.high
    return (f"<b>{text}</b>" if sure else text) + f" ({escape(ratio_text(ratio.low))}–{escape(ratio_text(ratio.high))})"
