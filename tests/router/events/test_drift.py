"""Drift's state machine: what raises an alarm, what is done about it, and when it is over."""

from __future__ import annotations

import pytest

from router.events.drift import COOL_DOWN, LEAST_REQUESTS, LEAST_SECONDS, LIMIT, Drift, Step


class Judged:
    """A rank's drift with a clock of its own, a second a request."""

    def __init__(self) -> None:
        self.drift = Drift()
        self.now = 1000.0

    def judge(self, requests: int, gap: int = 0, prompt: int = 1000, every: float = 1.0) -> list[Step]:
        steps = []
        for _ in range(requests):
            self.now += every
            steps.append(self.drift.judge(gap, prompt, self.now))
        return [step for step in steps if step]

    def wait(self, seconds: float) -> bool:
        """Whether there is an alarm then."""
        self.now += seconds
        self.drift.tick(self.now)
        return self.drift.alarm


def test_ratio_and_bias_are_shares_of_prompt_tokens() -> None:
    judged = Judged()
    assert judged.drift.ratio == judged.drift.bias == 0
    judged.judge(1, gap=300)
    judged.judge(1, gap=-300)
    assert judged.drift.ratio == pytest.approx(0.3)
    assert judged.drift.bias == pytest.approx(0, abs=0.01)


def test_what_is_long_ago_counts_no_more() -> None:
    judged = Judged()
    judged.judge(30, gap=500)
    judged.judge(600)
    assert judged.drift.ratio < 0.01


def test_a_gap_below_the_limit_never_alarms() -> None:
    judged = Judged()
    assert judged.judge(2000, gap=int(990 * LIMIT)) == []


@pytest.mark.parametrize(("requests", "every"), [(LEAST_REQUESTS - 1, 10.0), (10 * LEAST_REQUESTS, 0.01)])
def test_it_takes_many_requests_and_some_time(requests: int, every: float) -> None:
    judged = Judged()
    assert requests * every < LEAST_SECONDS or requests < LEAST_REQUESTS
    assert judged.judge(requests, gap=900, every=every) == []
    assert judged.judge(1, gap=900, every=LEAST_SECONDS) == ["rebuild"]


def test_a_few_long_prompts_are_no_drift() -> None:
    judged = Judged()
    for _ in range(20):
        assert judged.judge(1, gap=100_000, prompt=100_000) == []
        assert judged.judge(19) == []
    assert judged.drift.ratio > LIMIT


def drifting(gap: int) -> Judged:
    """Just when its rank is to be rebuilt."""
    judged = Judged()
    assert judged.judge(LEAST_REQUESTS, gap=gap) == ["rebuild"]
    assert judged.drift.alarm
    assert judged.drift.found == pytest.approx((abs(gap) / 1000, gap / 1000))
    assert judged.drift.ratio == 0
    return judged


def test_an_alarm_is_over_when_as_many_requests_agree() -> None:
    judged = drifting(500)
    judged.judge(LEAST_REQUESTS - 1)
    assert judged.drift.alarm
    judged.judge(1)
    assert not judged.drift.alarm


def test_an_alarm_is_over_when_nothing_is_heard_of_it_for_long() -> None:
    judged = drifting(500)
    assert judged.wait(COOL_DOWN - 1)
    assert not judged.wait(1)


def test_an_index_that_still_believes_in_too_much_is_learned_anew_and_only_once() -> None:
    judged = drifting(500)
    assert judged.judge(LEAST_REQUESTS, gap=500) == ["relearn"]
    assert judged.judge(20 * LEAST_REQUESTS, gap=500) == []
    assert judged.drift.alarm
    judged.judge(1000)
    assert not judged.drift.alarm


def test_an_index_that_knows_too_little_gains_nothing_by_forgetting() -> None:
    judged = drifting(-500)
    assert judged.judge(20 * LEAST_REQUESTS, gap=-500) == []
    assert judged.wait(10 * COOL_DOWN)
    assert judged.drift.bias == pytest.approx(-0.5)


def test_one_that_comes_back_at_once_alarms_and_is_rebuilt_after_a_while() -> None:
    judged = drifting(500)
    judged.judge(LEAST_REQUESTS)
    assert not judged.drift.alarm
    assert judged.judge(100, gap=900) == []
    assert judged.drift.alarm
    assert judged.judge(200, gap=900) == ["rebuild", "relearn"]
