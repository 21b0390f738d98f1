"""What a soak's samples tell: lines fitted, quarters compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.soak.samples import Sample
from tests.soak.verdict import Limits, growth, judge, warm_up


def samples(
    rss: Callable[[int], float] = lambda _: 100.0,
    p50: Callable[[int], float | None] = lambda _: 1.0,
    descriptors: Callable[[int], int] = lambda _: 50,
) -> list[Sample]:
    return [Sample(5.0 * n, rss(n), descriptors(n), 10, 1, p50(n), 3.0) for n in range(40)]


def failed(found: list[Sample]) -> list[str]:
    return [finding.what for finding in judge(found, Limits()) if not finding.good]


def test_what_stays_as_it_was_is_good() -> None:
    assert failed(samples(lambda n: 100 + n % 3)) == []


def test_memory_that_grows_is_found_and_told() -> None:
    assert failed(samples(lambda n: 100 + 0.12 * n)) == []
    assert failed(samples(lambda n: 100 + 0.14 * n)) == ["growth of memory"]
    assert judge(samples(lambda n: 100 + 0.14 * n), Limits())[0].seen == "+5.5% ± 0.0%"


def test_a_spike_is_no_growth_and_shrinking_is_none() -> None:
    assert failed(samples(lambda n: 130.0 if n == 20 else 100.0)) == []
    assert failed(samples(lambda n: 200.0 - n)) == []


def test_descriptors_that_are_left_open_are_found() -> None:
    assert failed(samples(descriptors=lambda n: 50 + n)) == ["growth of open files"]


def test_latency_is_compared_by_quarters() -> None:
    late = ["overhead, p50, first to last quarter"]
    assert failed(samples(p50=lambda n: 1.0 if n < 30 else 1.19)) == []
    assert failed(samples(p50=lambda n: 1.0 if n < 30 else 1.21)) == late
    assert failed(samples(p50=lambda n: 1.0 + (n == 35))) == []
    assert failed(samples(p50=lambda n: None)) == ["overhead, p50"]


def test_a_line_is_fitted() -> None:
    assert growth([0, 1, 2, 3], [10, 11, 12, 13]) == pytest.approx((0.3, 0.0))


def test_a_line_s_chance_is_told() -> None:
    # Slope 0.6 and start 10.1 by least squares; off by 0.1, 0.3, 0.3, 0.1: 0.2 in squares, of 2 degrees of freedom.
    seen, chance = growth([0, 1, 2, 3], [10, 11, 11, 12])
    assert seen == pytest.approx(1.8 / 10.1)
    assert chance == pytest.approx(2 * (0.2 / 2 / 5) ** 0.5 * 3 / 10.1)


def test_what_may_be_chance_is_no_growth() -> None:
    few = [Sample(5.0 * n, 100.0, count, 10, 1, 1.0, 3.0) for n, count in enumerate([30, 41, 28, 38, 45, 33, 40, 46])]
    assert growth([each.at for each in few], [each.descriptors for each in few])[0] > 0.2
    assert failed(few) == []


@pytest.mark.parametrize(("seconds", "left_out"), [(1800, 360), (600, 120), (300, 120), (90, 45)])
def test_how_long_it_warms_up(seconds: float, left_out: float) -> None:
    assert warm_up(seconds) == left_out


def test_too_few_samples_are_no_verdict() -> None:
    with pytest.raises(ValueError, match="too short"):
        judge(samples()[:3], Limits())
