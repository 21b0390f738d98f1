"""Retries in proportion to requests."""

from __future__ import annotations

import pytest

from router.retry_budget import LEAST, SECONDS, RetryBudget


def granted(budget: RetryBudget, now: float, under_way: int = 0) -> int:
    """Retries that it allows at once."""
    found = 0
    while budget.has(now, under_way):
        budget.take()
        found += 1
    return found


def test_a_quiet_router_may_retry_too() -> None:
    assert granted(RetryBudget(0.2, 0.0), 0.0) == LEAST * SECONDS
    assert granted(RetryBudget(0.0, 0.0), 0.0) == LEAST * SECONDS


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_where_everything_fails_the_load_grows_by_the_share_and_little_more(share: float) -> None:
    budget, retries, rate = RetryBudget(share, 0.0), 0, 500
    for tick in range(60 * rate):
        budget.request()
        if budget.has(tick / rate, 0):
            budget.take()
            retries += 1
    assert retries == pytest.approx(60 * (LEAST + share * rate) + LEAST * SECONDS, rel=0.1)


def test_a_share_of_many_slow_requests_may_be_sent_again() -> None:
    budget = RetryBudget(0.2, 0.0)
    for _ in range(500):
        budget.request()
    assert budget.has(0.0, 500)  # from now on they count less and less
    assert granted(budget, 60.0, under_way=500) == LEAST * SECONDS + 100
    assert granted(budget, 60.0, under_way=500) == 0


def test_what_was_spent_comes_back() -> None:
    budget = RetryBudget(0.2, 0.0)
    assert granted(budget, 0.0) > 0
    assert granted(budget, 0.0) == 0
    assert granted(budget, SECONDS) == pytest.approx(LEAST * SECONDS * (1 - 1 / 2.718), abs=2)
