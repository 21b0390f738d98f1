"""What is remembered of tenants that do not wait."""

from __future__ import annotations

from router.scheduling.shares import MOST_IDLE, Shares


def test_of_names_that_never_come_again_no_more_are_remembered_than_a_limit() -> None:
    shares = Shares()
    shares.enter("waits")
    for number in range(3 * MOST_IDLE):
        shares.pass_by(f"once {number}", 1.0 + number % 100)
    assert len(shares.served) <= MOST_IDLE + 3
    assert shares.waiting("waits") == 1


def test_who_was_served_most_is_remembered_longest() -> None:
    shares = Shares()
    shares.enter("waits")
    shares.pass_by("greedy", 50.0)
    for number in range(3 * MOST_IDLE):
        shares.pass_by(f"once {number}", 1.0)
    number, served = shares.standing("greedy")
    assert served[number] == 50.0
