"""A worker's circuit breaker, second by second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.workers.breaker import FAILURES, LONGEST, PATIENCE, WAIT, WINDOW, Breaker

MOST = 1 - 2**-53


def broken(now: float = 0.0, draw: float = MOST) -> Breaker:
    breaker = Breaker(FAILURES, lambda: draw)
    changes = [breaker.failed(now) for _ in range(FAILURES)]
    assert changes == [False] * (FAILURES - 1) + [True]
    return breaker


def test_it_opens_after_enough_failures() -> None:
    assert broken().state == "open"
    assert not broken().admits


def test_failures_that_are_long_ago_do_not_count() -> None:
    breaker = Breaker(2)
    breaker.failed(0.0)
    assert not breaker.failed(WINDOW + 1)
    assert breaker.failed(WINDOW + 2)


def test_few_failures_among_many_answers_do_not_open_it() -> None:
    breaker = Breaker(FAILURES)
    breaker.failed(0.0)
    for _ in range(FAILURES + 1):
        breaker.succeeded(1.0)
    assert not any(breaker.failed(2.0) for _ in range(FAILURES - 1))
    assert breaker.failed(2.0), "half of all have failed"


def test_nothing_is_kept_of_a_worker_that_never_fails() -> None:
    breaker = Breaker()
    assert breaker.quiet
    assert not breaker.succeeded(0.0)
    assert breaker.quiet
    breaker.failed(0.0)
    assert not breaker.quiet
    breaker.succeeded(WINDOW + 1)
    assert breaker.quiet


def test_one_that_stays_sick_for_hours_is_tried_as_ever() -> None:
    """By then it has been tried more than a thousand times."""
    breaker, now = broken(), 0.0
    for _ in range(1100):
        now += LONGEST
        assert breaker.tick(now)
        assert breaker.failed(now)
    assert breaker.state == "open"


@pytest.mark.parametrize(("draw", "wait"), [(0.0, WAIT / 2), (MOST, WAIT)])
def test_one_request_probes_it_after_a_while(draw: float, wait: float) -> None:
    breaker = broken(100.0, draw)
    assert not breaker.tick(100.0 + wait - 0.01)
    assert breaker.tick(100.0 + wait + 0.01)
    assert (breaker.state, breaker.admits) == ("half-open", True)
    assert breaker.sent(103.0)
    assert (breaker.state, breaker.admits) == ("half-open", False)
    assert not breaker.sent(103.0)


def test_a_probe_that_is_answered_closes_it() -> None:
    breaker = broken()
    breaker.tick(WAIT)
    breaker.sent(WAIT)
    assert breaker.succeeded(WAIT + 1)
    assert (breaker.state, breaker.admits, breaker.quiet) == ("closed", True, True)
    assert not any(breaker.failed(WAIT + 2) for _ in range(FAILURES - 1))


def test_a_probe_that_fails_opens_it_for_longer_each_time_but_never_for_long() -> None:
    breaker, now, waits = broken(), 0.0, []
    for _ in range(6):
        since = now
        while not breaker.tick(now):
            now += 0.01
        waits.append(now - since)
        assert breaker.sent(now)
        assert breaker.failed(now)
    assert waits[:3] == pytest.approx([WAIT, 2 * WAIT, 4 * WAIT], abs=0.02)
    assert max(waits) == pytest.approx(LONGEST, abs=0.02)
    assert LONGEST < 10, "who is back serves again within ten seconds"


def test_a_probe_of_which_nothing_is_heard_makes_room_for_another() -> None:
    breaker = broken()
    breaker.tick(WAIT)
    breaker.sent(WAIT)
    assert not breaker.tick(WAIT + PATIENCE - 0.1)
    assert breaker.tick(WAIT + PATIENCE)
    assert breaker.admits


def test_answers_to_what_was_sent_before_do_not_close_it() -> None:
    breaker = broken()
    assert not breaker.succeeded(1.0)
    assert breaker.state == "open"


def test_a_worker_that_starts_anew_is_not_blamed() -> None:
    breaker = broken()
    breaker.reset()
    assert (breaker.state, breaker.quiet) == ("closed", True)
    breaker.trip(0.0)
    assert breaker.tick(WAIT), "nor kept out for longer than any other"


def test_one_that_is_known_to_be_sick_needs_no_count() -> None:
    breaker = Breaker()
    breaker.trip(0.0)
    assert (breaker.admits, breaker.quiet) == (False, False)
    assert breaker.tick(WAIT)


steps = st.lists(st.tuples(st.sampled_from(["sent", "succeeded", "failed", "tick", "trip"]), st.floats(0, 5)))


@given(steps)
def test_whatever_happens_it_admits_again_within_ten_seconds(history: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(FAILURES, lambda: MOST), 0.0
    for step, passed in history:
        now += passed
        before = breaker.admits, breaker.state
        changed = getattr(breaker, step)(now)
        if step != "trip" and (breaker.admits, breaker.state) != before:
            assert changed, "the fleet must hear of it"
    breaker.tick(now + LONGEST)
    breaker.tick(now + LONGEST + PATIENCE)
    assert breaker.admits
