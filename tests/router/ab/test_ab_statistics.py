from __future__ import annotations

import math
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ab.client import Outcome
from router.ab.statistics import Record, balance, imbalance, percentile, record, spread, summarise

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1)


def outcome(**changes: object) -> Outcome:
    fields = {"sent": 10.1, "first": 10.5, "last": 12.5, "status": 200, "worker": "a"}
    tokens = {"prompt_tokens": 100, "cached_tokens": 40, "output_tokens": 5}
    return Outcome(**(fields | tokens | changes))  # type: ignore[arg-type]


def made(**changes: object) -> Record:
    return record(0, 10.0, outcome(**changes), start=9.0, speedup=4)


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.5, 2.5), (0.25, 1.75), (1, 4)])
def test_percentiles_interpolate(share: float, value: float) -> None:
    assert percentile([1, 2, 3, 4], share) == value


@given(values=numbers, share=st.floats(0, 1))
def test_a_percentile_lies_within(values: list[float], share: float) -> None:
    ordered = sorted(values)
    assert ordered[0] - 1e-6 <= percentile(ordered, share) <= ordered[-1] + 1e-6


@given(values=numbers)
def test_the_median_is_the_median(values: list[float]) -> None:
    assert percentile(sorted(values), 0.5) == pytest.approx(statistics.median(values))


def test_spread_of_nothing_is_nan() -> None:
    assert math.isnan(spread([None]).mean)
    assert math.isnan(spread([]).p99)
    assert spread([1.0, None, 3.0]).mean == 2.0


def test_a_record_is_in_simulated_seconds() -> None:
    one = made()
    assert one.at == 4.0
    assert one.lag == pytest.approx(0.4)
    assert one.ttft == pytest.approx(1.6)
    assert one.e2e == pytest.approx(9.6)
    assert one.tpot == pytest.approx(2.0)


def test_one_token_has_no_time_per_token() -> None:
    assert made(output_tokens=1).tpot is None


def test_an_error_has_no_times() -> None:
    one = made(error="status 500: x", first=0.0)
    assert (one.ttft, one.tpot, one.e2e) == (None, None, None)


@pytest.mark.parametrize(
    ("per_worker", "workers", "value"),
    [
        ({"a": 10.0, "b": 10.0}, 2, 1.0),
        ({"a": 10.0}, 4, 4.0),
        ({"a": 30.0, "b": 10.0}, 2, 1.5),
        ({"a": 0.0}, 4, 1.0),
    ],
)
def test_imbalance(per_worker: dict[str, float], workers: int, value: float) -> None:
    assert imbalance(per_worker, workers) == value


def test_a_summary() -> None:
    records = [made(), made(worker="b", cached_tokens=80), made(error="no")]
    found = summarise(records, workers=2)
    assert (found.requests, found.errors) == (3, 1)
    assert found.hit_ratio == 120 / 200
    assert found.imbalance_prefill == 60 * 2 / 80
    assert found.imbalance_requests == 1.0
    assert found.duration == pytest.approx(14.0)
    assert found.output_tokens_per_second == pytest.approx(10 / 14)


def test_who_computes_prompts_and_who_answers_are_balanced_apart() -> None:
    """One of two computes three quarters of the prompts; two others answer half of the requests each."""
    parts = [("p", "a"), ("p", "b"), ("p", "a"), ("q", "b")]
    records = [made(prefill_worker=prefill, worker=answer) for prefill, answer in parts]
    found = summarise(records, workers=4)
    assert (found.imbalance_prefill, found.imbalance_requests) == (1.5, 1.0)
    assert balance(records, 4) == [(0.0, 1.5)]
    # Whoever serves some whole does both.
    mixed = summarise([*records, made(worker="a"), made(worker="p")], workers=4)
    assert mixed.imbalance_prefill == 4 * 3 / 6
    assert mixed.imbalance_requests == 3 * 3 / 6


def test_a_summary_of_errors_only() -> None:
    found = summarise([made(error="no")], workers=2)
    assert (found.errors, found.requests_per_second, found.output_tokens_per_second) == (1, 0.0, 0.0)
    unknown = (found.ttft.mean, found.hit_ratio, found.imbalance_prefill, found.imbalance_requests)
    assert all(map(math.isnan, unknown))


def test_a_fleet_that_breaks_down_half_way_answers_half_as_many_a_second() -> None:
    """Each is due in its own second and answered in no time; those from 5 s on fail."""
    lasting = [msgspec.structs.replace(made(), at=float(second), lag=0.0, e2e=0.0) for second in range(11)]
    broken = [one if one.at < 5 else msgspec.structs.replace(one, error="x", ttft=None, e2e=None) for one in lasting]
    whole, half = (summarise(records, 2, ttft_slo=2.0) for records in (lasting, broken))
    assert (whole.duration, half.duration) == (10, 10)
    assert (whole.requests_per_second, half.requests_per_second) == (1.1, 0.5)
    assert (whole.goodput, half.goodput) == (1.1, 0.5)


def test_goodput_counts_what_was_in_time() -> None:
    """TTFTs of 1.6, 1.6 and 9.6 s, and an error; all over at 13.6 s."""
    records = [made(), made(), made(first=12.5, last=12.5), made(error="x")]
    found = summarise(records, 2, ttft_slo=1.7)
    assert found.in_time == 0.5
    assert found.goodput == pytest.approx(2 / found.duration)
    assert summarise(records, 2, ttft_slo=1.5).in_time == 0
    assert math.isnan(summarise(records, 2).goodput)
    failed = summarise([made(error="x")], 2, ttft_slo=1.7)
    assert (failed.in_time, failed.goodput) == (0, 0)  # else a mean over seeds would be of the others


def at(moment: float, worker: str, tokens: int = 100) -> Record:
    return msgspec.structs.replace(made(worker=worker, prompt_tokens=tokens, cached_tokens=0), at=moment)


def test_balance_over_time() -> None:
    """First half even, second half all on one of two workers: four requests to a window."""
    records = [at(0.0, "a"), at(1.0, "b"), at(2.0, "a"), at(3.0, "b"), *(at(4.0 + n, "a") for n in range(4))]
    assert balance(records, 2) == [(0.0, 1.0), (3.5, 2.0)]
    assert balance(records, 8) == [(0.0, 6.0)]  # too few requests for more than one
    assert balance([made(error="x")], 2) == []


def test_a_window_in_which_nothing_came_is_left_out() -> None:
    records = [at(0.0, "a"), at(0.1, "b"), at(0.2, "a"), at(9.0, "b"), at(9.1, "a"), at(9.2, "b")]
    assert [begin for begin, _ in balance(records, 1)] == pytest.approx([0.0, 9.2 * 2 / 3])
