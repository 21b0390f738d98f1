"""Charts as SVG text (pure). Colours come from the page's style, by class, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from router.page.scales import Scale, linear, logarithmic, tick_text

COLOURS = 8
"""Colours that the style has; a further line takes the first again, and is dashed."""
_ROUNDS = 3
"""How often: with dashes of two kinds. Beyond, only names tell lines apart."""
NARROW, WIDE = 370, 590
"""Widths to draw at: about as wide as charts are shown, so that text has its size."""
_HEIGHT = 250
_TOP, _BOTTOM = 12, 42
_BAR = 26
_ASIDE = 2.5
"""By which each line with marks is moved, so that intervals do not cover each other."""
_ASIDE_OF_ALL = 17.5
"""By which the last is moved at most: further away, its dots would seem to be of another rate."""


class Margins(NamedTuple):
    left: float
    right: float


_LINES, _BARS = Margins(52, 14), Margins(104, 56)
"""Beside bars stand names, and behind them values."""
_NAME = 15
"""Letters of a name for which there is room beside a bar."""


class Point(NamedTuple):
    """`low` and `high`: ends of its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Line(NamedTuple):
    name: str
    colour: int
    points: Sequence[Point]


class Axis(NamedTuple):
    title: str
    low: float | None = None
    """Where it begins; at the least value where it is not stated."""
    log: bool = False
    unit: str = ""
    """Behind each tick."""

    def scale(self, values: Iterable[float]) -> Scale:
        return logarithmic(values) if self.log else linear(values, self.low)


class _Frame(NamedTuple):
    """Where values lie on the drawing."""

    x: Scale
    y: Scale
    width: float
    height: float
    margins: Margins

    @property
    def floor(self) -> float:
        return self.height - _BOTTOM

    @property
    def right(self) -> float:
        return self.width - self.margins.right

    def across(self, x: float) -> float:
        return self.margins.left + self.x.place(x) * (self.right - self.margins.left)

    def down(self, y: float) -> float:
        return _TOP + (1 - self.y.place(y)) * (self.floor - _TOP)


def line_chart(title: str, x: Axis, y: Axis, lines: Sequence[Line], width: float = NARROW) -> str:
    """Narrow ones are of few points, and have a dot for each that tells its value when it is pointed at."""
    marks = width == NARROW
    points = [point for line in lines for point in line.points if math.isfinite(point.y)]
    ends = [end for point in points for end in (point.y, point.low, point.high) if end is not None]
    frame = _Frame(x.scale(point.x for point in points), y.scale(ends), width, _HEIGHT, _LINES)
    aside = min(_ASIDE, _ASIDE_OF_ALL / max(1, len(lines) - 1)) * marks
    drawn = "".join(_line(frame, line, marks, aside * number) for number, line in enumerate(lines))
    return _svg(title, frame, _x_axis(frame, x) + _y_axis(frame, y) + drawn)


def bar_chart(title: str, unit: str, form: str, bars: Sequence[Line]) -> str:
    """One lying bar for each line, of its only point's `y`, with its interval; the value is written by `form`."""
    values = [line.points[0] for line in bars]
    scale = linear([end for value in values for end in (value.y, value.high or 0.0) if math.isfinite(end)], 0.0)
    frame = _Frame(scale, Scale(0, 1, ()), NARROW, _TOP + _BAR * len(bars) + _BOTTOM, _BARS)
    drawn = "".join(_bar(frame, line, form, _TOP + _BAR * (row + 0.5)) for row, line in enumerate(bars))
    return _svg(title, frame, _x_axis(frame, Axis(unit)) + drawn)


def _svg(title: str, frame: _Frame, inside: str) -> str:
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" aria-label="{label}">{inside}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _bar_name(x: float, y: float, name: str) -> str:
    """A long one is cut in its middle: names of a kind differ at their ends."""
    if len(name) <= _NAME:
        return _text(x, y, name, "end")
    short = f"{name[:9]}…{name[10 - _NAME :]}"
    told = f"<title>{escape(name)}</title>{escape(short)}"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="end">{told}</text>'


def _y_axis(frame: _Frame, axis: Axis) -> str:
    parts, left = [], frame.margins.left
    for tick in frame.y.ticks:
        at = frame.down(tick)
        parts.append(f'<path class="grid" d="M{left:g} {at:.1f}H{frame.right:g}"/>')
        parts.append(_text(left - 6, at + 3.5, tick_text(tick) + axis.unit, "end"))
    middle = (frame.floor + _TOP) / 2
    return (
        "".join(parts)
        + f'<text class="axis" transform="translate(11 {middle:g}) rotate(-90)">{escape(axis.title)}</text>'
    )


def _x_axis(frame: _Frame, axis: Axis) -> str:
    parts = []
    for tick in frame.x.ticks:
        at = frame.across(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{frame.floor:g}"/>')
        parts.append(_text(at, frame.floor + 15, tick_text(tick) + axis.unit, "middle"))
    centre = (frame.margins.left + frame.right) / 2
    return "".join(parts) + f'<text class="axis" x="{centre:g}" y="{frame.height - 8:g}">{escape(axis.title)}</text>'


def _line(frame: _Frame, line: Line, marks: bool, aside: float) -> str:
    """Between two points that are known it has a gap where one is not: nothing was answered there."""
    parts = [list(part) for known, part in groupby(line.points, lambda point: math.isfinite(point.y)) if known]
    drawn = "".join(_polyline(frame, line, part, aside) for part in parts)
    points = [point for part in parts for point in part]
    marks = marks or len(points) == 1  # a line of one point would not be seen
    return drawn + "".join(_mark(frame, line, point, aside) for point in points if marks)


def _polyline(frame: _Frame, line: Line, points: Sequence[Point], aside: float) -> str:
    path = " ".join(f"{frame.across(point.x) + aside:.1f},{frame.down(point.y):.1f}" for point in points)
    return f'<polyline class="line {_colour(line)}" points="{path}"><title>{escape(line.name)}</title></polyline>'


def _colour(line: Line) -> str:
    return colour_class(line.colour)


def colour_class(colour: int) -> str:
    """Classes in the page's style."""
    again = colour // COLOURS % _ROUNDS
    return f"c{colour % COLOURS}" + (f" again{again}" if again else "")


def _mark(frame: _Frame, line: Line, point: Point, aside: float) -> str:
    x, y = frame.across(point.x) + aside, frame.down(point.y)
    told = f"{escape(line.name)}: {point.y:.4g} at {point.x:.4g}"
    whisker = ""
    if point.low is not None and point.high is not None:
        told += f" (95 % interval {point.low:.4g} to {point.high:.4g})"
        low, high = frame.down(point.low), frame.down(point.high)
        path = f"M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}"
        whisker = f'<path class="whisker {_colour(line)}" d="{path}"/>'
    return (
        f'{whisker}<circle class="dot {_colour(line)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{told}</title></circle>'
    )


def _bar(frame: _Frame, line: Line, form: str, middle: float) -> str:
    value, left = line.points[0], frame.margins.left
    name = _bar_name(left - 8, middle + 4, line.name)
    if not math.isfinite(value.y):
        return name
    end, width = frame.across(value.y), _BAR - 8
    place = f'x="{left:g}" y="{middle - width / 2:g}" width="{end - left:.1f}" height="{width}" rx="2"'
    bar = f'<rect class="bar {_colour(line)}" {place}/>'
    whisker = ""
    if value.low is not None and value.high is not None:
        low, end = frame.across(value.low), frame.across(value.high)
        path = f"M{low:.1f} {middle:g}H{end:.1f}M{low:.1f} {middle - 4:g}v8M{end:.1f} {middle - 4:g}v8"
        whisker = f'<path class="whisker ink" d="{path}"/>'
    return name + bar + whisker + _text(end + 6, middle + 4, form.format(value.y), "start")
