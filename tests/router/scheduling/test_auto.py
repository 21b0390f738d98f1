"""What makes a rank dearer, what a prefix is worth, and when a request stays in the router."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from router.scheduling.auto import Auto, Utilisation
from router.scheduling.auto_costs import ENOUGH, SOON, memory_waits
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import Cost
from tests.router.scheduling.candidates import Scripted, named, situation

CAPACITY = 10_000
EQUAL: dict[str, Any] = {
    "requests": [1, 1],
    "queue": [0.1, 0.1],
    "prefill": [0.2, 0.2],
    "step": [0.01, 0.01],
    "active": [2_000, 2_000],
    "capacity": [CAPACITY, CAPACITY],
}


def cost_of(**differences: Any) -> Cost:
    return Auto().cost(situation(named("ab"), 1_000, **{**EQUAL, **differences}))


def test_equals_cost_the_same() -> None:
    first, second = cost_of().values.tolist()
    assert first == second > 0


@pytest.mark.parametrize(
    "worse",
    [
        {"queue": [0.3, 0.1]},
        {"held": [0.3, 0.0]},
        {"prefill": [0.3, 0.2], "whole": [0.3, 0.3]},
        {"work": [0.2, 0.1], "busy": 0.5},
        {"step": [0.05, 0.01]},
        {"requests": [9, 1]},
        {"active": [9_900, 2_000]},
        {"capacity": [2_500, CAPACITY]},
    ],
    ids=lambda worse: next(iter(worse)),
)
def test_each_of_these_makes_a_rank_dearer(worse: dict[str, Any]) -> None:
    first, second = cost_of(**worse).values.tolist()
    assert first > second


def test_loads_delay_others_the_more_the_more_ranks_load() -> None:
    costs = [
        Auto().cost(situation(named("a"), 1_000, load=[2.0], own_load=[1.0], loading=share)).values[0]
        for share in (0.0, 0.5, 0.75, 1.0)
    ]
    assert costs == pytest.approx([2.0, 3.0, 5.0, 6.0])


def looked_at(*looks: tuple[float, float]) -> float:
    """The delay after looks at (seconds, share)."""
    utilisation = Utilisation()
    for now, share in looks:
        utilisation.see(share, now)
    return utilisation.delay


def steadily(share: float, since: float, seconds: float) -> list[tuple[float, float]]:
    return [(since + at * 0.05, share) for at in range(1, round(seconds / 0.05) + 1)]


def test_a_steady_share_is_what_it_is() -> None:
    assert looked_at(*steadily(0.75, 0.0, 20.0)) == pytest.approx(3.0, rel=0.01)
    assert looked_at(*steadily(1.0, 0.0, 20.0)) == pytest.approx(8.0)


@pytest.mark.parametrize("idle", [0.0, 60.0], ids=["at the start", "after a minute in which nothing came"])
def test_what_was_idle_for_long_is_seen_to_be_busy_at_once(idle: float) -> None:
    """The idle time counts as the third of a second that one look speaks for, and that less and less."""
    before = [*steadily(0.2, 0.0, 10.0), (10.0 + idle, 0.0)] if idle else [(10.0, 0.0)]
    for seconds in (0.3, 0.6):
        busy, rest = 2.0 * (1 - math.exp(-seconds / 2)), 0.3 * math.exp(-seconds / 2)
        assert looked_at(*before, *steadily(1.0, 10.0 + idle, seconds)) == pytest.approx(busy / rest, rel=0.05)


def test_memory_costs_nothing_until_it_is_short() -> None:
    first, second = cost_of(active=[8_000, 0]).values.tolist()
    assert first == pytest.approx(second)


def test_seconds_of_others_work_count_as_seconds() -> None:
    idle = {"requests": [0, 0]}
    base = cost_of(**idle).values[0]
    assert cost_of(**idle, queue=[1.1, 0.1]).values[0] == pytest.approx(base + 1.0)
    assert cost_of(**idle, held=[0.5, 0.0]).values[0] == pytest.approx(base + 0.5)


def test_what_a_step_takes_anyway_delays_nobody() -> None:
    first, second = cost_of(requests=[0, 0], prefill=[0.3, 0.3], work=[0.3, 0.2], busy=0.75).values.tolist()
    assert first - second == pytest.approx(3 * 0.1)  # what else is weighed four times counts once


def test_of_equals_the_one_that_computed_least_of_late_is_taken_and_a_prefix_counts_for_more() -> None:
    two = {"computed": [8.0, 4.0], "requests": [0, 0]}
    first, second = cost_of(**two, prefill=[0.2, 0.2]).values.tolist()
    assert first - second == pytest.approx(0.1 * 0.2 / 2)
    first, second = cost_of(**two, prefill=[0.2, 0.2], busy=0.5).values.tolist()
    assert first - second == pytest.approx(0.1 * 0.2 / 2 / 2)  # twice the weight on all prefill, half on this
    holder, other = cost_of(**two, prefill=[0.18, 0.2]).values.tolist()
    assert holder < other


@pytest.mark.parametrize(("held", "weight"), [(0.0, 4.0), (6.0, 7.0), (60.0, 34.0), (600.0, 34.0)])
def test_work_delays_half_of_those_that_are_held_up_to_a_limit(held: float, weight: float) -> None:
    two = named("ab")
    costs = Auto().cost(situation(two, 1_000, busy=0.75, requests=[0, 0], prefill=[0.3, 0.2], held_requests=held))
    assert costs.values[0] - costs.values[1] == pytest.approx(weight * 0.1)


def weights_of(computed: list[float]) -> list[float]:
    """Of own work, on two ranks and on one three times as slow, in a fleet where it is 4 at most."""
    fleet: dict[str, Any] = {"requests": [0] * 3, "busy": 0.75, "computed": computed}
    less, more = (
        Auto().cost(situation(named("abc"), 1_000, **fleet, prefill=prefill, work=work)).values
        for prefill, work in (([0.4, 0.4, 1.2], [0.3, 0.3, 0.9]), ([1.4, 1.4, 2.2], [1.3, 1.3, 1.9]))
    )
    weights: list[float] = (more - less).tolist()
    return weights


@pytest.mark.parametrize(
    ("computed", "weights"),
    [
        ([0.0, 0.0, 0.0], [4.0, 4.0, 4.0]),
        ([3.0, 3.0, 1.0], [4.0, 4.0, 4.0]),
        ([3.0, 6.0, 3.0], [1.0 + 3.0 * 0.5, 4.0, 4.0]),
        ([6.0, 1.5, 0.5], [4.0, 1.0 + 3.0 * 0.5, 1.0 + 3.0 * 0.5]),
        ([6.0, 6.0, 0.0], [4.0, 4.0, 1.0]),
    ],
    ids=["nothing yet", "as busy", "half the mean", "both others half the mean", "an idle one"],
)
def test_work_delays_fewer_where_a_rank_was_less_busy(computed: list[float], weights: list[float]) -> None:
    """In seconds of its own: the slow rank was as busy as others when it computed a third as much."""
    assert weights_of(computed) == pytest.approx(weights, abs=0.1 / 4)  # up to a tenth spreads idle ranks


def test_all_of_it_counts_the_more_the_more_requests_a_rank_has() -> None:
    """By the fourth root: sixteen times as many make it twice as dear."""
    few, many = (cost_of(requests=[count - 1, 0]).values[0] for count in (1, 16))
    assert many == pytest.approx(2 * few)


def test_the_fuller_the_fleet_the_more_a_prefix_is_worth() -> None:
    worth = []
    for busy in (0.0, 0.3, 0.6, 0.9, 1.0):
        holder, other = cost_of(prefill=[0.1, 0.6], busy=busy).values.tolist()
        worth.append(other - holder)
    assert worth == sorted(worth)
    assert worth[0] >= 0.5
    assert 2 * worth[0] < worth[-1] < 10 * worth[0]


def test_how_full_it_is_is_averaged_over_seconds() -> None:
    policy = Auto()

    def worth(busy: float, now: float) -> float:
        now_situation = situation(named("ab"), 1_000, **{**EQUAL, "prefill": [0.1, 0.6]}, busy=busy, now=now)
        holder, other = policy.cost(now_situation).values.tolist()
        return float(other - holder)

    calm = worth(0.0, 100.0)
    assert worth(0.9, 100.0) == calm, "no time has passed"
    rising = [worth(0.9, 100.0 + seconds) for seconds in (1, 5, 20, 60)]
    assert [calm, *rising] == sorted([calm, *rising])
    assert worth(0.9, 400.0) == pytest.approx(rising[-1], rel=0.1)
    assert worth(0.0, 500.0) == pytest.approx(calm, rel=0.01)
    assert worth(0.0, 300.0) == pytest.approx(calm, rel=0.01), "a clock that is behind does no harm"


@pytest.mark.parametrize(
    ("state", "goes"),
    [
        ({}, True),
        ({"queue": [ENOUGH - 0.21] * 2}, True),
        ({"queue": [ENOUGH - 0.19] * 2}, False),
        ({"queue": [0.0] * 2, "prefill": [9.0] * 2, "whole": [9.0] * 2}, True),
        ({"queue": [SOON - 0.01] * 2, "prefill": [9.0] * 2, "whole": [9.0] * 2}, True),
        ({"queue": [0.2] * 2, "prefill": [9.0] * 2, "whole": [9.0] * 2}, True),
        ({"queue": [0.3] * 2, "prefill": [9.0] * 2, "whole": [9.0] * 2}, False),
        ({"queue": [SOON] * 2, "prefill": [1.0] * 2, "whole": [1.0] * 2}, False),
        ({"queue": [0.09] * 2, "prefill": [1.0] * 2, "whole": [1.0] * 2, "step": [0.1] * 2}, True),
        ({"queue": [0.11] * 2, "prefill": [1.0] * 2, "whole": [1.0] * 2, "step": [0.1] * 2}, False),
        ({"queue": [9.0, 8.0], "late": [9.0, 8.0]}, True),
        ({"queue": [9.0, 8.0], "late": [0.0, 8.0]}, False),
        ({"queue": [9.0, 8.0], "late": [8.0, 7.0]}, False),
        ({"queue": [9.0] * 2, "late": [9.0] * 2, "active": [9_000] * 2}, False),
        # For a slot, not for prefills.
        ({"queue": [0.3] * 2, "undone": [0.01] * 2}, True),
        ({"queue": [0.4] * 2, "undone": [0.01] * 2}, False),
        ({"queue": [0.4] * 2, "undone": [0.01] * 2, "step": [0.5] * 2}, True),
        ({"held": [0.01] * 2}, False),
        ({"active": [9_000] * 2}, False),
        ({"active": [8_000] * 2}, True),
        # An idle rank is never too full, whoever waits.
        ({"requests": [0, 0], "held": [5.0] * 2}, True),
        ({"requests": [0, 0], "capacity": [10, 10]}, True),
    ],
)
def test_a_request_goes_while_its_rank_needs_work_and_has_room(state: dict[str, Any], goes: bool) -> None:
    two = situation(named("ab"), 1_000, **{**EQUAL, **state})
    assert Cheapest(Auto()).choose(two, Scripted([0.0])).hold is not goes


@pytest.mark.parametrize(
    ("prompt", "overlap", "most"),
    [(100, 0, 9_850), (1_000, 0, 8_500), (4_000, 0, 5_500), (800, 600, 9_400)],
    ids=["half of a short prompt", "half of it, and 5 %", "5 % of the rank's memory", "half of what is held too"],
)
def test_some_memory_stays_free(prompt: int, overlap: int, most: int) -> None:
    full = [
        situation(named("a"), prompt, requests=[9], overlap=[overlap], active=[active], capacity=[CAPACITY])
        for active in (most, most + 1)
    ]
    assert [Cheapest(Auto()).choose(each, Scripted([0.0])).hold for each in full] == [False, True]
    taken, capacity = np.array([most, most + 100]), np.array([CAPACITY] * 2)
    waits = memory_waits(taken, np.array([prompt - overlap] * 2), prompt, capacity, 10.0)
    assert waits.tolist() == pytest.approx([0.0, 100 * 10.0 / (most + 100)])


@pytest.mark.parametrize("answer", [0.0, 300.0, 2_000.0, 2_400.0])
def test_under_an_objective_memory_has_to_last_until_running_answers_have_grown(answer: float) -> None:
    steps = np.arange(0.0, 10_000.0)
    held = 0
    for active in range(0, 9_900, 300):
        ten = 10 * np.exp(-steps / max(answer, 1e-9)) * ((active + 100) / 10 + steps)
        about: dict[str, Any] = {"requests": [9], "active": [active], "capacity": [CAPACITY], "answer": answer}
        free, bound = (situation(named("a"), 100, **about, limit=limit) for limit in (math.inf, 2.0))
        assert not Cheapest(Auto()).choose(free, Scripted([0.0])).hold
        too_full = active > 0 and float(ten.max()) + 50 > CAPACITY
        assert Cheapest(Auto()).choose(bound, Scripted([0.0])).hold == too_full
        held += too_full
    assert (held > 0) == (answer > 300)


def test_a_rank_that_does_not_tell_its_memory_has_room() -> None:
    assert not Cheapest(Auto()).choose(situation(named("a"), 10**6, active=[10**9], requests=[5]), Scripted([])).hold


def test_a_whole_prompt_is_meant_at_the_mean_of_all() -> None:
    assert cost_of(whole=[1.0, 3.0]).prompt == 2.0


def test_a_rank_that_others_keep_full_gets_one_of_ours() -> None:
    full = {"requests": [9, 9], "memory": [CAPACITY, CAPACITY], "capacity": [CAPACITY, CAPACITY]}
    may_go = cost_of(**full, own=[0, 1]).open
    assert may_go is not None
    assert may_go.tolist() == [True, False]
