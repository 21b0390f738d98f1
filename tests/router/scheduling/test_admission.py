"""Who is taken, held or refused, by what is predicted of it."""

from __future__ import annotations

import math

import pytest

from router.scheduling.admission import NO_OBJECTIVES, Admission, Objectives, Refusal, SloAction, Verdict
from router.scheduling.decision import Prediction

ADMIT, HOLD = Verdict.ADMIT, Verdict.HOLD


def prediction(ttft: float = 0.0, step: float = 0.0, idle: bool = False) -> Prediction:
    """Its time to first token is half queue."""
    return Prediction(ttft / 2, ttft / 8, ttft * 3 / 8 - step, step, idle)


def test_a_prediction_adds_up() -> None:
    assert Prediction(1.0, 2.0, 4.0, 8.0, idle=False).ttft == 15.0
    assert Prediction(1.0, 2.0, 4.0, 8.0, idle=False).tbt == 8.0


@pytest.mark.parametrize("objectives", [NO_OBJECTIVES, Objectives(1.0), Objectives(None, 0.1), Objectives(1.0, 0.1)])
def test_what_keeps_to_all_objectives_is_taken(objectives: Objectives) -> None:
    for action in ("reject", "queue"):
        assert Admission(objectives, action).judge(prediction(1.0, 0.1), 0.0) is ADMIT


def test_without_objectives_everything_is_taken() -> None:
    assert Admission().judge(prediction(1e9, 1e9), 1e9) is ADMIT


@pytest.mark.parametrize(
    ("ttft", "step", "waited", "expected"),
    [
        (1.5, 0.0, 0.0, Refusal("ttft", 1.5, 1.0, 0.0)),
        (0.75, 0.0, 0.5, Refusal("ttft", 1.25, 1.0, 0.5)),  # what was waited in the router counts
        (0.5, 0.25, 0.25, Refusal("tbt", 0.25, 0.125, 0.25)),
        (9.0, 0.25, 0.0, Refusal("ttft", 9.0, 1.0, 0.0)),
    ],
)
def test_what_would_miss_one_is_refused(ttft: float, step: float, waited: float, expected: Refusal) -> None:
    assert Admission(Objectives(1.0, 0.125)).judge(prediction(ttft, step), waited) == expected


@pytest.mark.parametrize(
    ("ttft", "waited", "verdict"),
    [
        (1.5, 0.0, HOLD),
        (1.5, 9.99, HOLD),
        (1.5, 10.0, Refusal("ttft", 1.5, 1.0, 10.0)),
        (0.9, 9.0, ADMIT),  # counted from when it is sent
        (0.9, 99.0, ADMIT),
    ],
)
def test_a_queued_one_waits_as_long_as_patience_lasts(ttft: float, waited: float, verdict: Verdict | Refusal) -> None:
    assert Admission(Objectives(1.0), "queue", patience=10.0).judge(prediction(ttft), waited) == verdict


@pytest.mark.parametrize("action", ["reject", "queue"])
def test_an_idle_rank_is_always_asked(action: SloAction) -> None:
    """Nothing else could show that it has recovered."""
    assert Admission(Objectives(0.1, 0.01), action).judge(prediction(99.0, 9.0, idle=True), 99.0) is ADMIT


@pytest.mark.parametrize(("own", "taken"), [(None, False), (0.5, False), (3.0, True)])
def test_a_requests_own_objective_stands_for_the_general_one(own: float | None, taken: bool) -> None:
    assert (Admission(Objectives(1.0)).judge(prediction(2.0), 0.0, own) is ADMIT) is taken
    assert (Admission().judge(prediction(2.0), 0.0, own) is ADMIT) is (own != 0.5)


@pytest.mark.parametrize("action", ["reject", "queue"])
def test_one_that_may_take_for_ever_has_no_objective(action: SloAction) -> None:
    """Nor the general ones."""
    admission = Admission(Objectives(1.0, 0.1), action, patience=10.0)
    assert not admission.concerns(math.inf)
    assert admission.limit(math.inf) == admission.ttft_left(99.0, math.inf) == math.inf
    assert admission.missed(99.0, math.inf) is None


@pytest.mark.parametrize(
    ("predicted", "limit", "seconds"), [(1.5, 1.0, 1), (4.0, 1.0, 3), (4.1, 1.0, 4), (0.2, 0.1, 1)]
)
def test_when_to_try_again_is_whole_seconds_and_never_at_once(predicted: float, limit: float, seconds: int) -> None:
    assert Refusal("ttft", predicted, limit, 0.0).retry_after == seconds


def test_what_may_be_predicted_of_a_request() -> None:
    assert Admission(Objectives(ttft=2.0)).ttft_left(0.5) == 1.5
    assert Admission(Objectives(ttft=2.0), "queue").ttft_left(0.5) == 2.0
    assert Admission(Objectives(ttft=2.0)).ttft_left(0.5, ttft=4.0) == 3.5
    assert Admission(Objectives(tbt=2.0)).ttft_left(0.5) == math.inf


def test_nothing_is_remembered() -> None:
    admission = Admission(Objectives(1.0))
    assert isinstance(admission.judge(prediction(9.0), 0.0), Refusal)
    assert admission.judge(prediction(0.5), 0.0) is ADMIT
