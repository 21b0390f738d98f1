"""What is drawn from a seed is the same again, and leaves somebody well."""

from __future__ import annotations

import random
from collections import Counter

from tests.chaos.questions import Questions
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.schedule import Schedule
from tests.chaos.ward import STAY, Ward


def schedule(seed: int, count: int) -> list[tuple[float, str]]:
    drawn = Schedule({"cut": 3.0, "kill": 1.0}, random.Random(seed))
    return [drawn.next() for _ in range(count)]


def test_a_schedule_is_its_seeds() -> None:
    assert schedule(1, 20) == schedule(1, 20) != schedule(2, 20)


def test_kinds_come_as_often_as_they_should() -> None:
    drawn = schedule(1, 4000)
    assert 0.7 < Counter(kind for _, kind in drawn)["cut"] / 4000 < 0.8
    assert 900 < sum(wait for wait, _ in drawn) < 1100


def test_questions_are_their_seeds() -> None:
    once, again = (Questions(random.Random(3)) for _ in range(2))
    assert [once.next() for _ in range(10)] == [again.next() for _ in range(10)]


def test_as_many_are_ill_as_there_are_beds() -> None:
    ward = Ward(4, 2, random.Random(1))
    struck = {ward.admit() for _ in range(30)}
    assert len(struck) == 2
    assert ward.well == 2


def test_who_is_ill_for_long_must_recover_first() -> None:
    ward = Ward(4, 1, random.Random(1))
    (worker,) = {ward.admit() for _ in range(STAY)}
    assert worker is not None
    assert ward.admit() is None
    for _ in range(STAY):
        ward.discharge(worker)
    assert ward.well == 4
    assert ward.admit() is not None


def test_of_what_takes_a_worker_whole_there_is_one_at_a_time() -> None:
    ward = Ward(4, 1, random.Random(1))
    worker = ward.admit(alone=True)
    assert worker is not None
    assert ward.admit(alone=True) is None
    assert ward.admit() == worker
    ward.returning.add(worker)
    assert ward.admit() is None
    ward.returning.clear()
    ward.discharge(worker, alone=True)
    assert ward.admit(alone=True) == worker


def test_somebody_is_always_well() -> None:
    assert all(0 < scenario.beds < scenario.workers for scenario in SCENARIOS.values())
