"""How the most that a router holds is looked for."""

from __future__ import annotations

import pytest

from scripts.bench.load import Outcome
from tests.load.capacity import EXPLODED, FIRST, most
from tests.load.idle_streams import Plan


def outcome(rate: float, p99: float = 0.01, errors: int = 0, share: float = 1.0) -> Outcome:
    return Outcome(int(rate * 5 * share), errors, 5.0, -1.0, p99 / 2, p99)


@pytest.mark.parametrize("limit", [FIRST, 240.0, 1000.0, 3333.0])
def test_the_most_is_found_within_a_fifth(limit: float) -> None:
    held = most(lambda rate: outcome(rate, p99=0.01 if rate <= limit else 1.0), 20_000)
    assert 0.83 * limit <= held.rate <= limit
    assert held.p99 == 0.01
    assert held.steps < 20


@pytest.mark.parametrize(
    "bad", [None, outcome(500, errors=1), outcome(500, p99=EXPLODED * 1.01), outcome(500, share=0.9)]
)
def test_what_is_not_held(bad: Outcome | None) -> None:
    held = most(lambda rate: outcome(rate) if rate < 500 else bad, 20_000)
    assert FIRST < held.rate < 500


def test_nothing_is_held_where_the_first_step_fails() -> None:
    assert most(lambda rate: None, 20_000).rate == 0


def test_it_looks_no_higher_than_told() -> None:
    asked: list[float] = []

    def run(rate: float) -> Outcome:
        asked.append(rate)
        return outcome(rate)

    assert most(run, 400).rate == 400
    assert max(asked) == 400


def test_the_first_stream_is_open_when_the_last_begins() -> None:
    for plan in (Plan(9000, 10.0), Plan(1000, 2.0), Plan(10, 10.0)):
        assert (plan.tokens - 1) * plan.interval >= plan.streams / 50
