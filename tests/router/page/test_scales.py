from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.page.scales import linear, logarithmic, tick_text

NUMBERS = st.lists(st.floats(1e-6, 1e9), min_size=1)


@given(NUMBERS)
def test_every_value_lies_between_round_ticks(values: list[float]) -> None:
    for scale in (linear(values), linear(values, 0.0), logarithmic(values)):
        assert all(-1e-9 <= scale.place(value) <= 1 + 1e-9 for value in values)
        assert list(scale.ticks) == sorted(set(scale.ticks))
        assert len(scale.ticks) <= 16
        assert scale.low < scale.high


def test_linear_ticks() -> None:
    assert linear([0.3, 9.2], 0.0).ticks == (0, 2, 4, 6, 8, 10)
    assert linear([1.0], 1.0).low == 1.0
    assert linear([]).ticks[0] == 0
    assert linear([math.nan, 4.0], 0.0).high == 4.0


def test_logarithmic_ticks() -> None:
    assert logarithmic([0.03, 0.9]).ticks == (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    wide = logarithmic([0.0012, 70.0])
    assert wide.ticks == (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
    assert wide.place(0.1) == pytest.approx(0.4)


@pytest.mark.parametrize(("value", "text"), [(0.1 + 0.2, "0.3"), (1000, "1000"), (20_000, "20k"), (0, "0")])
def test_tick_texts(value: float, text: str) -> None:
    assert tick_text(value) == text
