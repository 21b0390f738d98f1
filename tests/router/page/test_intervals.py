from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest

from router.page.intervals import NORMAL_95, Interval, mean_interval, ratio_interval, ratio_of, ratio_text


def test_an_interval_by_hand() -> None:
    """Values 1, 2, 3: s = 1, t(2) = 4.303, so the half width is 4.303 / sqrt(3)."""
    found = mean_interval([1, 2, 3])
    assert found.mean == 2
    assert found.half == pytest.approx(4.303 / math.sqrt(3))


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.0, "0.00"), (0.333, "0.33"), (99.5, "99.50"), (123.4, "123"), (12_345_678_901.0, ">9999"), (math.inf, ">9999")],
)
def test_a_ratio_has_no_more_digits_than_it_tells(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text


@pytest.mark.parametrize("number", [2, 3, 16, 17, 40])
def test_the_mean_lies_in_95_of_100_intervals(number: int) -> None:
    rng, held, times = random.Random(number), 0, 4000
    for _ in range(times):
        found = mean_interval([rng.gauss(5, 2) for _ in range(number)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 5 <= found.high
    assert held / times == pytest.approx(0.95, abs=0.012)  # some three standard errors


@pytest.mark.parametrize(
    ("values", "t"), [(2, 12.706), (16, 2.131), (17, 2.120), (21, 2.086), (61, 2.000), (121, 1.980)]
)
def test_the_interval_is_by_students_t(values: int, t: float) -> None:
    drawn = [float(number) for number in range(values)]
    half = mean_interval(drawn).half
    assert half is not None
    assert half / (statistics.stdev(drawn) / math.sqrt(values)) == pytest.approx(t, abs=1e-3)


def test_one_value_has_no_interval() -> None:
    assert mean_interval([7.0, math.nan]) == (7.0, None, None)
    assert math.isnan(mean_interval([]).mean)


def test_ratios_are_taken_seed_by_seed() -> None:
    """Seeds differ tenfold, and the ratio is the same in each: no doubt remains."""
    found = ratio_interval([1, 10, 100], [2, 20, 200])
    assert found == pytest.approx((0.5, 0.5, 0.5))
    assert ratio_interval([1, 4], [2, 2]).mean == pytest.approx(1.0)  # halved and doubled


def test_modes_that_are_the_same_do_not_differ() -> None:
    """In 95 of 100 series of five seeds, some of which are five times as hard for both."""
    rng, held, times = random.Random(9), 0, 3000
    for _ in range(times):
        hard = [rng.choice([1.0, 5.0]) for _ in range(5)]
        here, there = ([seed * rng.lognormvariate(0, 0.1) for seed in hard] for _ in range(2))
        found = ratio_interval(here, there)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1 <= found.high
        assert found.high / found.low < 3, "what is hard for both cancels"
    assert held / times == pytest.approx(0.95, abs=0.012)


def test_a_ratio_to_nothing_is_unknown() -> None:
    assert math.isnan(ratio_interval([1.0], [0.0]).mean)
    assert math.isnan(ratio_interval([math.nan], [1.0]).mean)
    assert math.isnan(ratio_interval([0.0, 1.0], [1.0, 1.0]).mean)


def test_a_ratio_of_two_values_without_intervals_has_none() -> None:
    assert ratio_of(Interval(0.0), Interval(2.0)) == (0.0, None, None)
    assert ratio_of(Interval(1.0), Interval(2.0, 1.0, 4.0)) == (0.5, None, None)
    assert math.isnan(ratio_of(Interval(1.0), Interval(0.0)).mean)


def test_the_ratio_of_two_means_lies_in_95_of_100_intervals() -> None:
    """Of 200 exponential times each, as response times often are; the true ratio is 1/2."""
    rng, held, times = random.Random(5), 0, 2000
    for _ in range(times):
        here, there = ([rng.expovariate(rate) for _ in range(200)] for rate in (2.0, 1.0))
        found = ratio_of(_known(here), _known(there))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.5 <= found.high
    assert held / times == pytest.approx(0.95, abs=0.015)


def test_a_ratio_is_as_unsure_as_the_ends_that_lead_there() -> None:
    """The one may be 3000 times as much, the other half as much."""
    found = ratio_of(Interval(0.1, 0.1, 300.0), Interval(0.1, 0.05, 0.1))
    assert found == pytest.approx((1.0, 1.0, math.exp(math.hypot(math.log(3000), math.log(2)))))
    assert ratio_of(Interval(2.0, -1.0, 5.0), Interval(1.0, 1.0, 1.0)) == (2.0, 0.0, 5.0)
    assert ratio_of(Interval(2.0, 2.0, 2.0), Interval(1.0, 0.0, 1.0)) == (2.0, 2.0, math.inf)


def _known(values: list[float]) -> Interval:
    mean, half = float(np.mean(values)), NORMAL_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
