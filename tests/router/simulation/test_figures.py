from __future__ import annotations

import pytest

from router.simulation.arrival import Sample
from router.simulation.figures import Goal, summarise


def sample(number: int, ttft: float, *, worker: int = 0, cached: int = 0, tpot: float = 0.01) -> Sample:
    return Sample(number, 1.0, 1.0 + ttft, 1.0 + ttft + 10 * tpot, 100, cached, 11, worker)


def test_a_run_in_numbers() -> None:
    samples = [
        sample(0, 0.5, cached=50),
        sample(1, 1.5, worker=1),
        sample(2, 0.6, tpot=0.2),
        Sample(3, 1.0, None, 1.0, 100, 0, 11, -1, "refused"),
        Sample(4, 1.0, 1.2, 1.5, 100, 0, 11, 0, "failed"),
    ]
    figures = summarise(samples, {0.01: 99, 0.5: 1}, 2, 10.0, Goal(1.0, 0.1))
    assert (figures.requests, figures.refused, figures.failed) == (5, 1, 1)
    assert figures.ttft.mean == pytest.approx((0.5 + 1.5 + 0.6) / 3)
    assert figures.hit_ratio == pytest.approx(50 / 300)
    assert figures.imbalance == pytest.approx(150 / 125)
    assert figures.goodput == pytest.approx(0.1)  # one kept to both goals
    assert (figures.itl.p50, figures.itl.p99, figures.itl.max) == (0.01, 0.01, 0.5)
    assert figures.itl.mean == pytest.approx(0.0149)


def test_what_came_from_a_store_is_counted_apart() -> None:
    samples = [sample(0, 0.5, cached=50)._replace(stored_tokens=25), sample(1, 0.5, worker=1)]
    figures = summarise(samples, {}, 2, 10.0, Goal(), store=True)
    assert (figures.hit_ratio, figures.store_ratio) == (0.25, 0.125)
    assert figures.imbalance == pytest.approx(100 / 62.5)
    assert summarise(samples[1:], {}, 2, 10.0, Goal()).store_ratio is None
