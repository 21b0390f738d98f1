"""How long KV takes is learned, near and far apart, and one odd observation changes little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.transfer import Transfers, prior_seconds


def expected(
    transfers: Transfers, tokens: int = 10_000, near: bool = False, hidden: float = 0.0, now: float = 0.0
) -> float:
    works = prior_seconds(np.array([tokens]), hidden)
    return float((works * transfers.factors(np.array([near]), now))[0])


def test_more_tokens_take_longer_and_prefill_hides_them_but_for_a_tail() -> None:
    transfers = Transfers()
    assert 0 < expected(transfers, 0) < expected(transfers, 1000) < expected(transfers, 10_000)
    assert expected(transfers, 10_000, hidden=100.0) == expected(transfers, 0)
    assert expected(transfers, 10_000, hidden=0.01) < expected(transfers, 10_000)


@pytest.mark.parametrize("factor", [0.05, 0.5, 1.0, 3.0, 40.0])
def test_what_is_observed_again_and_again_is_believed(factor: float) -> None:
    transfers = Transfers()
    work = expected(transfers)
    for _ in range(300):
        transfers.observe(near=False, work=work, seconds=factor * work, now=0.0)
    assert expected(transfers) == pytest.approx(factor * work, rel=0.02)
    assert expected(transfers, near=True) == work, "of those on one host nothing was seen"


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e9])
def test_one_odd_observation_changes_little(seconds: float) -> None:
    transfers = Transfers()
    before = expected(transfers)
    transfers.observe(near=False, work=before, seconds=seconds, now=0.0)
    assert 1 / 4 <= expected(transfers) / before <= 4, "the first tells more than the prior"
    for _ in range(100):
        transfers.observe(near=False, work=before, seconds=before, now=0.0)
    transfers.observe(near=False, work=before, seconds=seconds, now=0.0)
    assert 0.8 < expected(transfers) / before < 1.25


def test_a_network_far_from_the_prior_is_known_soon() -> None:
    transfers = Transfers()
    work = expected(transfers)
    for _ in range(10):
        transfers.observe(near=False, work=work, seconds=100 * work, now=0.0)
    assert 0.4 < expected(transfers) / (100 * work) < 2
    for _ in range(10):
        transfers.observe(near=False, work=work, seconds=100 * work, now=0.0)
    assert 0.5 < expected(transfers) / (100 * work) < 2


@given(st.lists(st.tuples(st.booleans(), st.floats(0.005, 1e3), st.floats(0, 1e6)), max_size=200))
def test_whatever_is_observed_estimates_stay_numbers(observed: list[tuple[bool, float, float]]) -> None:
    transfers = Transfers()
    for near, work, seconds in observed:
        transfers.observe(near, work, seconds, 0.0)
    for near in (False, True):
        assert 0 < expected(transfers, near=near) < 1e6


def test_a_tenth_of_odd_ones_does_not_spoil_the_rest() -> None:
    transfers = Transfers()
    work = expected(transfers)
    for number in range(500):
        transfers.observe(near=False, work=work, seconds=1e6 if number % 10 == 9 else work, now=0.0)
    assert expected(transfers) < 2 * work


def test_what_is_learned_fades_when_nothing_is_moved() -> None:
    """Where transfers seem to take long requests are served whole: nobody could ever show that they do not."""
    transfers = Transfers()
    work = expected(transfers)
    for turn in range(20):
        transfers.observe(near=False, work=work, seconds=40 * work, now=10.0 * turn)
    learned = expected(transfers, now=190.0) / work
    assert 15 < learned < 50
    assert learned / 4 < expected(transfers, now=390.0) / work < learned / 2
    assert expected(transfers, now=3_790.0) / work < 1.1
    transfers.observe(near=False, work=work, seconds=work, now=3_790.0)
    assert expected(transfers, now=3_790.0) / work < 1.1
