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
    assert judge(samples(lambda n: 100 + 0.14 * n), Limits())[0].seen == "+5.5%"


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
    assert growth([0, 1, 2, 3], [10, 11, 12, 13]) == pytest.approx(0.3)


@pytest.mark.parametrize(("seconds", "left_out"), [(1800, 360), (600, 120), (300, 120), (90, 45)])
def test_how_long_it_warms_up(seconds: float, left_out: float) -> None:
    assert warm_up(seconds) == left_out


def test_too_few_samples_are_no_verdict() -> None:
    with pytest.raises(ValueError, match="too short"):
        judge(samples()[:3], Limits())
