"""An engine that does not answer rests, and is asked again now and then."""

from __future__ import annotations

from router.answering import REST, Answering


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_question_without_an_answer_is_nothing() -> None:
    answering = Answering(Clock())
    for _ in range(3):
        answering.silent("a")
        assert answering.resting() == frozenset()
        answering.forget("a")


def test_who_does_not_answer_rests_and_is_then_asked_once_at_a_time() -> None:
    answering = Answering(clock := Clock())
    answering.silent("a")
    answering.silent("a")
    assert answering.resting() == {"a"}
    clock.now += REST
    assert answering.resting() == frozenset()
    answering.asked("a")
    assert answering.resting() == {"a"}, "until it is known whether it answers"
    answering.silent("a")
    assert answering.resting() == {"a"}
    clock.now += REST
    answering.asked("a")
    answering.forget("a")
    assert answering.resting() == frozenset()
    answering.silent("a")
    assert answering.resting() == frozenset(), "it counts from the beginning"


def test_who_answers_is_asked_as_often_as_there_is_a_question() -> None:
    answering = Answering(Clock())
    answering.asked("a")
    answering.asked("b")
    assert answering.resting() == frozenset()
    answering.forget("nobody")


def test_each_is_judged_by_itself() -> None:
    answering = Answering(Clock())
    for worker in ("a", "b", "a"):
        answering.silent(worker)
    assert answering.resting() == {"a"}
