"""A copy is bought once so much was lost by its missing as it costs, and never for what comes once."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from indexer.matches import Overlap
from router.scheduling.auto import Auto
from router.scheduling.auto_costs import auto_costs
from router.scheduling.cheapest import Cheapest
from router.scheduling.copies import MEMORY, Copies
from router.scheduling.load import LoadBook
from router.scheduling.scheduler import Scheduler
from tests.router.scheduling.candidates import holding, named, rank, situation

HOT, OTHER = 7, 8


def paid_after(*rents: tuple[float, float]) -> float:
    """At the last of (seconds, rent)."""
    account = Copies()
    for now, rent in rents:
        account.pay(HOT, rent, now)
    return account.paid(HOT, rents[-1][0])


def test_rents_add_up_from_the_second_time_on() -> None:
    assert paid_after((0.0, 5.0)) == 0.0
    assert paid_after((0.0, 5.0), (1.0, 0.2)) == pytest.approx(0.2)
    assert paid_after((0.0, 5.0), (1.0, 0.2), (2.0, 0.2)) == pytest.approx(0.4, rel=0.02)


def test_no_more_is_paid_than_time_has_passed() -> None:
    """Eight samples of a prompt at once are no reason to compute it eight times."""
    assert paid_after(*[(1.0, 5.0)] * 8) == 0.0
    assert paid_after((1.0, 5.0), (1.3, 5.0), (1.3, 5.0)) == pytest.approx(0.3)


def test_what_was_paid_is_forgotten_in_time() -> None:
    account = Copies()
    account.pay(HOT, 1.0, 0.0)
    account.pay(HOT, 1.0, 1.0)
    assert account.paid(HOT, 1.0 + MEMORY) == pytest.approx(math.exp(-1))


def test_each_copy_is_paid_for_anew_and_each_prefix_for_itself() -> None:
    account = Copies()
    for now in (0.0, 1.0):
        account.pay(HOT, 1.0, now)
    assert account.paid(OTHER, 1.0) == 0.0
    account.buy(HOT, 2.0)
    assert account.paid(HOT, 2.0) == 0.0
    account.pay(HOT, 0.5, 3.0)
    assert account.paid(HOT, 3.0) == pytest.approx(0.5)


def test_those_that_come_no_more_make_room() -> None:
    account = Copies(remembered=2)
    for now, prefix in enumerate((HOT, OTHER, HOT, 9, HOT)):
        account.pay(prefix, 1.0, float(now))
    assert account.paid(HOT, 4.0) > 1.0
    account.pay(OTHER, 1.0, 5.0)
    assert account.paid(OTHER, 5.0) == 0.0, "it was forgotten, and comes for the first time"


# -- in the policy's costs

HOLDERS: dict[str, Any] = {"overlap": [900, 0], "prefill": [0.1, 1.0], "requests": [15, 0], "step": [0.02, 0.01]}
"""Of 1,000 tokens: a holds 900, and streams beside; b is idle."""


def taken(times: int, every: float = 1.0, **differences: Any) -> list[int]:
    """Who costs least, each time that the same is asked for."""
    policy, found = Auto(), []
    for time in range(times):
        now = situation(named("ab"), 1_000, **{**HOLDERS, "prefix": HOT, **differences}, now=time * every)
        found.append(int(policy.cost(now).values.argmin()))
    return found


def test_what_is_lost_adds_up_to_a_copy_now_and_then() -> None:
    found = taken(40)
    first = found.index(1)
    # 0.26 s for crowd and steps instead of 0.115 s, and 1.015 s for the copy
    assert 5 <= first <= 8
    assert sum(found) <= 40 / first


@pytest.mark.parametrize(
    ("computed", "other"), [([0.0, 0.0], 0.02 + 4 * 0.08 + 0.015), ([3.0, 0.0], 0.02 + 0.08 + 0.015)], ids=["", "idle"]
)
def test_what_is_lost_is_weighed_as_on_the_rank_that_lacks_the_prefix(computed: list[float], other: float) -> None:
    about = {**HOLDERS, "work": [0.08, 0.98], "computed": computed}
    now = situation(named("ab"), 1_000, **about)
    *_, rent = auto_costs(now.counts, now.estimates, 1_000, 4.0, 0.0, 10.0, 0.0, np.empty(2), np.empty(2, np.bool_))
    assert rent == pytest.approx(2 * (0.02 + 4 * 0.08 + 0.03) - other)


@pytest.mark.parametrize(
    "differences",
    [
        {"prefix": None},
        {"requests": [0, 0], "step": [0.01, 0.01]},
        {"overlap": [0, 0]},
        {"overlap": [900, 900], "prefill": [0.1, 0.1], "queue": [0.0, 0.2]},
        {"queue": [0.0, 2.0]},
        {"prefill": [0.1, 4.0], "work": [0.09, 3.6]},  # ten times slower, by its base: it would gain nothing
        {"limit": 1.0},  # the copy would take 1.01 s
        {"queue": [1.0, 0.0], "prefill": [0.4, 9.0], "own": [1, 1]},  # held: it is looked at again and again
    ],
)
def test_nothing_is_lost(differences: dict[str, Any]) -> None:
    assert set(taken(100, **differences)) == {0}


def test_that_a_rank_computed_most_is_no_loss() -> None:
    """Else what is asked for slowly would wander through an idle fleet."""
    idle = {"requests": [0, 0], "step": [0.01, 0.01], "computed": [100.0, 0.0]}
    assert set(taken(300, every=0.1, **idle)) == {0}


def test_what_keeps_to_its_objective_all_the_same_buys() -> None:
    assert 1 in taken(40, limit=1.02)


def test_conversations_pay_for_nothing() -> None:
    """What is held of each is longer every time, so that no prefix comes twice."""
    policy = Auto()
    for turn in range(100):
        now = situation(named("ab"), 1_000, **HOLDERS, prefix=turn, now=float(turn))
        assert int(policy.cost(now).values.argmin()) == 0


@pytest.mark.parametrize(
    ("ranks", "requests", "queue", "copied"),
    [
        ("ba", [0, 15], 0.0, 0),
        ("bac", [3, 15, 0], 0.0, 2),
        ("bac", [0, 15, 3], 0.0, 0),
        ("bac", [7, 15, 1], 0.4, 0),  # it would cost less at c, which has enough to do
    ],
)
def test_the_copy_is_made_where_it_costs_least(ranks: str, requests: list[int], queue: float, copied: int) -> None:
    policy, others = Auto(), len(ranks) - 2
    holders: dict[str, Any] = {
        "overlap": [0, 900] + [0] * others,
        "prefill": [1.0, 0.1] + [1.0] * others,
        "step": [0.01, 0.02] + [0.01] * others,
        "requests": requests,
        "own": requests,
        "queue": [0.0] * (others + 1) + [queue],
    }
    found = []
    for time in range(40):
        now = situation(named(ranks), 1_000, **holders, prefix=HOT, now=float(time))
        found.append(int(policy.cost(now).values.argmin()))
    assert set(found) == {1, copied}


def test_all_at_once_buy_nothing() -> None:
    assert set(taken(100, every=0.0)) == {0}


def test_the_prefix_that_is_paid_for_is_the_one_that_is_cached() -> None:
    candidates = named("ab")
    choosing = Scheduler(Cheapest(Auto()), LoadBook(), random.Random(0))
    for each in candidates.ranks:
        choosing.watch(each, 16)
    for _ in range(2):
        streaming = choosing.select(named("a"), 2_000, holding({}), 0.0)
        choosing.reserve(streaming, 0.0).first_token(0.0)
    held = holding({rank("a"): Overlap(110, 110)})
    found = [choosing.select(candidates, 2_000, held, float(now)).rank for now in range(40)]
    assert 5 <= found.index(rank("b")) <= 8, "not at once, and not never"
