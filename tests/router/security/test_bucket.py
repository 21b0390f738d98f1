"""The token bucket under a clock of the test's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.security.bucket import Bucket


def test_a_minutes_requests_at_once_then_evenly() -> None:
    bucket = Bucket(6, 100.0)
    assert [bucket.take(100.0) for _ in range(6)] == [0.0] * 6
    assert bucket.take(100.0) == pytest.approx(10.0)
    assert bucket.take(104.0) == pytest.approx(6.0)
    assert bucket.take(110.0) == 0.0
    assert bucket.take(110.0) == pytest.approx(10.0)


def test_it_never_holds_more_than_a_minutes() -> None:
    bucket = Bucket(2, 0.0)
    assert [bucket.take(1e6) > 0 for _ in range(3)] == [False, False, True]


def test_less_than_one_a_minute_is_one_at_a_time() -> None:
    bucket = Bucket(0.5, 0.0)
    assert bucket.take(0.0) == 0.0
    assert bucket.take(0.0) == pytest.approx(120.0)
    assert bucket.take(120.0) == 0.0
    assert [bucket.take(1e6) > 0 for _ in range(2)] == [False, True]


@given(st.floats(0.1, 600), st.lists(st.floats(0, 30), max_size=60))
def test_whatever_comes_no_more_passes_than_was_there_and_flowed_in(per_minute: float, gaps: list[float]) -> None:
    bucket, now, passed = Bucket(per_minute, 0.0), 0.0, 0
    for gap in gaps:
        now += gap
        wait = bucket.take(now)
        passed += not wait
        assert wait <= 60 / per_minute + 1e-6
    assert passed <= max(1.0, per_minute) + now * per_minute / 60 + 1e-6
