from __future__ import annotations

import math

import pytest

from router.simulation.arrival import Sample
from router.simulation.figures import Goal, summarise
from router.simulation.fleet import FleetSettings
from router.simulation.run import Run
from router.simulation.source import Requests


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
    figures = summarise(samples, {0.01: 99, 0.5: 1}, range(2), 10.0, Goal(1.0, 0.1))
    assert (figures.requests, figures.refused, figures.failed) == (5, 1, 1)
    assert figures.ttft.mean == pytest.approx((0.5 + 1.5 + 0.6) / 3)
    assert figures.e2e.mean == pytest.approx((0.6 + 1.6 + 2.6) / 3)
    assert figures.hit_ratio == pytest.approx(50 / 300)
    assert figures.imbalance == pytest.approx(150 / 125)
    assert figures.goodput == pytest.approx(0.1)  # one kept to both goals
    assert (figures.itl.p50, figures.itl.p99, figures.itl.max) == (0.01, 0.01, 0.5)
    assert figures.itl.mean == pytest.approx(0.0149)


def test_without_an_answer_hits_and_balance_are_unknown() -> None:
    figures = summarise([Sample(0, 1.0, None, 1.0, 100, 0, 11, -1, "refused")], {}, range(2), 10.0, Goal(), store=True)
    assert math.isnan(figures.hit_ratio)
    assert math.isnan(figures.imbalance)
    assert figures.store_ratio is not None
    assert math.isnan(figures.store_ratio)
    assert figures.goodput == 0


def test_time_counts_from_the_first_arrival() -> None:
    assert summarise([sample(0, 0.5)], {}, range(2), 10.0, Goal()).seconds == pytest.approx(0.6)
    requests = Requests("chat", duration=20.0, limit=5)
    rows = requests.rows(0, 1.0)
    figures = Run(requests, FleetSettings(workers=2), "round-robin").figures()
    assert figures.goodput == pytest.approx(5 / (rows[-1].timestamp - rows[0].timestamp) * 1000)


def test_who_only_decodes_is_no_part_of_the_balance() -> None:
    apart = FleetSettings(workers=4, prefill=1, decode=3)
    assert Run(Requests("chat", limit=5), apart, "round-robin").figures().imbalance == 1


def test_who_joined_is_no_part_of_the_balance() -> None:
    samples = [sample(0, 0.5), sample(1, 0.5, worker=1, cached=50), sample(2, 0.5, worker=7, cached=90)]
    assert summarise(samples, {}, range(2), 10.0, Goal()).imbalance == pytest.approx(100 / 75)
    assert math.isnan(summarise(samples[2:], {}, range(2), 10.0, Goal()).imbalance)


def test_no_goodput_is_told_of_requests_that_came_at_once() -> None:
    assert math.isnan(Run(Requests("chat", limit=1), FleetSettings(workers=2), "round-robin").figures().goodput)


def test_what_came_from_a_store_is_counted_apart() -> None:
    samples = [sample(0, 0.5, cached=50)._replace(stored_tokens=25), sample(1, 0.5, worker=1)]
    figures = summarise(samples, {}, range(2), 10.0, Goal(), store=True)
    assert (figures.hit_ratio, figures.store_ratio) == (0.25, 0.125)
    assert figures.imbalance == pytest.approx(100 / 62.5)
    assert summarise(samples[1:], {}, range(2), 10.0, Goal()).store_ratio is None
