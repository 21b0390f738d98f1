"""What is learned: known coefficients are found again, stalls bend nothing, and a worker that changes is followed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.types import RankSet, WorkerRank
from router.scheduling.latency import PREFILL_PRIOR, RESIDENCE_PRIOR, STEP_PRIOR, LatencyModel, Prefill, Shape, believed
from tests.router.scheduling.candidates import rank, repeatable
from tests.router.scheduling.predictions import prefill_factors, prefill_seconds, step_seconds

RANKS = [rank(name) for name in "abcdefgh"]
A, B = RANKS[:2]
STRANGER = rank("stranger")
EVERYBODY = RankSet(RANKS)

TRUTH = (0.03, 1 / 6_000, 6e-9)
"""Seconds, per token and per pair, of hardware some three times slower than the prior, and not in equal parts."""
STEP_TRUTH = (0.02, 4e-4, 3e-8)
PROMPTS = [Prefill(200, 200), Prefill(2_000, 2_000), Prefill(500, 12_000), Prefill(16_000, 16_000), Prefill(64, 30_000)]
STEPS = [(20, 60_000), (60, 30_000), (60, 200_000), (100, 400_000)]


def takes(prefill: Prefill, truth: tuple[float, float, float] = TRUTH) -> float:
    return truth[0] + truth[1] * prefill.new + truth[2] * prefill.pairs


def learning(ranks: Iterable[WorkerRank] = RANKS) -> LatencyModel:
    model = LatencyModel()
    for each in ranks:
        model.watch(each)
    return model


def predicted(model: LatencyModel, prefill: Prefill, now: float, on: WorkerRank = A) -> float:
    return model.prefill_work(prefill) * factor(model, now, on)


def factor(model: LatencyModel, now: float, on: WorkerRank = A) -> float:
    return float(prefill_factors(model, RankSet([on]), now)[0])


class Traffic:
    """Prefills of all sorts, one after another on each rank, as quick as `slowness` says."""

    def __init__(self, model: LatencyModel, truth: tuple[float, float, float] = TRUTH, seed: int = 1) -> None:
        self.model = model
        self.truth = truth
        self.slowness = dict.fromkeys(RANKS, 1.0)
        self.noise: Callable[[], float] = lambda: 1.0
        self.now = 1000.0
        self._random = random.Random(seed)
        self._free_at = dict.fromkeys(RANKS, self.now)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while True:
            each = min(RANKS, key=self._free_at.__getitem__)
            prompt = self._random.choice([300, 1_000, 4_000, 12_000])
            prefill = Prefill(max(1, int(prompt * self._random.random())), prompt)
            seen = takes(prefill, self.truth) * self.slowness[each] * self.noise()
            self._free_at[each] += seen
            if self._free_at[each] > until:
                self.now = until
                return
            self.now = max(self.now, self._free_at[each])
            self.model.observe_prefill(each, prefill, seen, self._free_at[each])


@pytest.mark.parametrize("others", range(1, 20))
def test_however_many_ranks_there_are_what_one_takes_says_nothing_of_a_stranger(others: int) -> None:
    ranks = [rank(f"w{number}") for number in range(others)]
    slow = rank("slow")
    model = learning([*ranks, slow])
    for now in range(5):
        for each in (*ranks, slow):
            model.observe_prefill(each, PROMPTS[1], takes(PROMPTS[1]) * (10 if each == slow else 1), float(now))
    assert factor(model, 5.0, slow) > 1.2 * factor(model, 5.0, STRANGER)


def test_before_anything_was_seen_the_prior_holds() -> None:
    model = learning()
    for prefill in PROMPTS:
        assert predicted(model, prefill, 0.0) == pytest.approx(takes(prefill, PREFILL_PRIOR))
    steps = step_seconds(model, RankSet([A]), np.array([2]), np.array([600]), 100, 0.0)
    assert steps.tolist() == pytest.approx([STEP_PRIOR[0] + 3 * STEP_PRIOR[1] + 700 * STEP_PRIOR[2]])
    assert model.residence == RESIDENCE_PRIOR


def test_pairs_are_of_each_new_token_with_all_before_it() -> None:
    assert Prefill(4, 4).pairs == 8.0
    assert Prefill(2, 10).pairs == 2 * 9
    assert Prefill(0, 10).pairs == 0


def test_the_others_of_a_batch_take_as_long_as_so_many_of_the_first() -> None:
    model = learning()
    assert model.others_share(3 * 2_000, 2_000) == pytest.approx(3 * model.prefill_share(Prefill(2_000, 2_000)))
    assert model.others_share(0, 2_000) == 0.0


@repeatable
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.integers(5000, 9000))
def test_many_works_at_once_are_each_as_alone(new: list[int], prompt: int) -> None:
    model = learning()
    Traffic(model).run(5)
    held = prompt - np.array(new, np.float64)
    ranks = RankSet([A] * len(new))
    works = (prefill_seconds(model, ranks, held, prompt, 0.0) / prefill_factors(model, ranks, 0.0)).tolist()
    assert works == pytest.approx([model.prefill_work(Prefill(each, prompt)) for each in new])


@pytest.mark.parametrize(
    "truth",
    [
        TRUTH,
        PREFILL_PRIOR,
        (0.002, 1 / 60_000, 2e-10),
        (0.1, 1 / 2_000, 1e-8),
    ],
)
def test_known_coefficients_are_found_again(truth: tuple[float, float, float]) -> None:
    model = learning()
    traffic = Traffic(model, truth)
    traffic.run(sum(takes(prefill, truth) for prefill in PROMPTS) * 60)
    for prefill in PROMPTS:
        assert predicted(model, prefill, traffic.now) == pytest.approx(takes(prefill, truth), rel=0.2), prefill


def test_a_hundred_stalls_do_not_bend_the_model() -> None:
    """One prefill in twenty takes fifty times as long: a mean would be three and a half times too high."""
    model = learning()
    traffic, drawn = Traffic(model), random.Random(2)
    traffic.noise = lambda: 50.0 if drawn.random() < 0.05 else 1.0
    traffic.run(400)
    for prefill in PROMPTS:
        assert 0.8 < predicted(model, prefill, traffic.now) / takes(prefill) < 1.6, prefill


def test_noise_averages_out() -> None:
    model = learning()
    traffic, drawn = Traffic(model), random.Random(3)
    traffic.noise = lambda: drawn.uniform(0.7, 1.3)
    traffic.run(200)
    for prefill in PROMPTS:
        assert predicted(model, prefill, traffic.now) == pytest.approx(takes(prefill), rel=0.25), prefill


@pytest.mark.parametrize("truth", [PREFILL_PRIOR, TRUTH])
def test_a_worker_that_gets_three_times_slower_is_followed_and_so_is_its_recovery(
    truth: tuple[float, float, float],
) -> None:
    """More than half of it within ten seconds, where each prefill takes as long as the prior says."""
    model = learning()
    traffic = Traffic(model, truth)
    traffic.run(60)
    pace = truth[1] / PREFILL_PRIOR[1]
    traffic.slowness[A] = 3.0
    traffic.run(10 * pace)
    assert factor(model, traffic.now) / factor(model, traffic.now, B) > 2.0
    traffic.run(20 * pace)
    believed_of_it = 2.6  # not 3: it bends the mean of the fleet, from which each is told apart
    assert factor(model, traffic.now) / factor(model, traffic.now, B) == pytest.approx(believed_of_it, rel=0.15)
    for other in RANKS[1:]:
        for prefill in PROMPTS:
            assert predicted(model, prefill, traffic.now, other) == pytest.approx(takes(prefill, truth), rel=0.25)
    traffic.slowness[A] = 1.0
    traffic.run(10 * pace)
    assert factor(model, traffic.now) / factor(model, traffic.now, B) == pytest.approx(1.0, abs=0.25)


def test_who_is_not_asked_any_more_is_taken_for_usual_again() -> None:
    """Else a worker that was slow once would be avoided for ever."""
    model = learning()
    traffic = Traffic(model, PREFILL_PRIOR)
    traffic.slowness[A] = 4.0
    traffic.run(60)
    slow = factor(model, traffic.now)
    later = [factor(model, traffic.now + seconds) for seconds in (10, 60, 600)]
    assert slow > later[0] > later[1] > later[2] == pytest.approx(1.0, abs=0.05)


def test_a_rank_of_which_nothing_is_known_takes_as_long_as_the_others() -> None:
    """Where all are slower than the prior, it would seem the quickest else, and get everything."""
    model = learning()
    slow = (1.0, 3.0)
    for now in (1.0, 5.0, 9.0, 13.0):
        for each, slowness in zip(RANKS[1:3], slow, strict=True):
            prefill = PROMPTS[3]
            model.observe_prefill(each, prefill, 3 * slowness * takes(prefill, PREFILL_PRIOR), now)
    unknown, least, most = (factor(model, 14.0, each) for each in (A, *RANKS[1:3]))
    assert 1 < least < unknown < most


@pytest.mark.parametrize("speed", [0.1, 1.0, 20.0, 200.0])
@pytest.mark.parametrize("seen", [(1, 0), (20, 0), (20, 1), (200, 3)])
def test_how_much_was_seen_of_a_rank_does_not_make_it_look_quicker(seen: tuple[int, int], speed: float) -> None:
    """Of two that are alike, whatever the prior says of them; a tenth is what `auto` adds to tell them apart."""
    model, prefill, now = learning(RANKS[:2]), Prefill(800, 800), 1.0
    for each, times in zip(RANKS, seen, strict=False):
        for _ in range(times):
            now += 0.01
            model.observe_prefill(each, prefill, takes(prefill, PREFILL_PRIOR) / speed, now)
    assert factor(model, now + 1, A) == pytest.approx(factor(model, now + 1, B), rel=0.12)


def test_after_next_to_nothing_a_usual_prefill_does_not_look_endless() -> None:
    model, prefill = learning(RANKS[:2]), Prefill(800, 800)
    model.observe_prefill(A, prefill, 0.0, 1.0)
    factor(model, 2.0)
    model.observe_prefill(B, prefill, takes(prefill, PREFILL_PRIOR), 2.1)
    assert factor(model, 2.2, B) < 30


def test_a_forgotten_ranks_place_tells_nothing_of_who_gets_it() -> None:
    model = learning([A])
    for _ in range(30):
        model.observe_prefill(A, PROMPTS[1], 3 * takes(PROMPTS[1]), 5.0)
        model.observe_steps(A, 10, 1.0, 5.0)
    model.fold_steps(A, 1, 100, 5.0)
    assert factor(model, 5.0) > 2
    model.observe_prefill(A, PROMPTS[1], takes(PROMPTS[1]), 5.0)
    model.forget(A)
    model.forget(A)
    model.watch(B)
    assert factor(model, 5.0, B) == factor(model, 5.0, STRANGER), "at once"
    assert factor(model, 6.0, B) == 1.0
    assert factor(model, 6.0, A) == 1.0
    one = np.ones(1, np.int64)
    assert step_seconds(model, RankSet([B]), one, one, 1, 5.0) == step_seconds(
        model, RankSet([STRANGER]), one, one, 1, 5.0
    )


def test_of_strangers_nothing_is_learned() -> None:
    model = learning([A])
    before = model.prefill_work(PROMPTS[1])
    for now in range(100):
        model.observe_prefill(STRANGER, PROMPTS[1], 9.0, now)
        assert not model.observe_steps(STRANGER, 9, 9.0, now)
        model.fold_steps(STRANGER, 1, 1, now)
    assert model.seconds_on(STRANGER, 9.0) == 0.0
    assert model.prefill_work(PROMPTS[1]) == before
    assert factor(model, 5.0, STRANGER) == 1.0


def test_prefills_that_end_in_one_step_are_learned_as_their_sum() -> None:
    """Four come back together: the first seems to have taken all the time, the others none."""
    model = learning([A])
    now, prefill = 0.0, Prefill(2_000, 2_000)
    for turn in range(400):
        seconds = 4 * takes(prefill) if turn % 4 == 0 else 0.0
        now += seconds
        model.observe_prefill(A, prefill, seconds, now)
    assert predicted(model, prefill, now) == pytest.approx(takes(prefill), rel=0.2)


def test_a_prefill_that_takes_next_to_nothing_tells_of_itself_alone() -> None:
    """It counts as of the step before, however long ago that was. The shape of then may have expected more of that step
    than the shape of now does of both."""
    model = learning([A, B])
    quick = (PREFILL_PRIOR[0] / 10, PREFILL_PRIOR[1] / 10, PREFILL_PRIOR[2] / 10)
    long = Prefill(100_000, 100_000)
    model.observe_prefill(A, long, takes(long, quick), 0.0)
    for turn in range(1, 200):
        usual = Prefill(8_000, 8_000)
        model.observe_prefill(B, usual, takes(usual, quick), 0.2 * turn)
    before = predicted(model, PROMPTS[1], 40.0)
    model.observe_prefill(A, Prefill(10, 8_000), 0.003, 40.0)
    assert predicted(model, PROMPTS[1], 40.0) == pytest.approx(before, rel=0.5)
    assert predicted(model, PROMPTS[1], 41.0) == pytest.approx(before, rel=0.5)


def test_what_a_step_takes_at_least_is_told_from_its_prefills() -> None:
    """Up to eight prefills come out of one, of which the first seems to have taken all the time: an outlier by itself,
    which must not bend the rank's factor."""
    model, now = learning([A]), 0.0
    for turn in range(2_000):
        count, prefill = 1 + turn % 8, PROMPTS[turn % 2]
        works = [takes(prefill)] + [takes(prefill) - TRUTH[0]] * (count - 1)
        now += sum(works)
        for seconds in (sum(works), *[0.0] * (count - 1)):
            model.observe_prefill(A, prefill, seconds, now)
    expected, shared = (each(PROMPTS[0]) * factor(model, now) for each in (model.prefill_work, model.prefill_share))
    assert expected == pytest.approx(takes(PROMPTS[0]), rel=0.1)
    assert shared == pytest.approx(takes(PROMPTS[0]) - TRUTH[0], rel=0.15)


@pytest.mark.parametrize("together", [1, 6])
def test_ranks_that_are_alike_look_alike_whatever_prompts_each_gets(together: int) -> None:
    """On hardware that the prior has wrong; one gets `together` in each step, the other one at a time."""
    truth, now = (0.06, 4e-5, 1e-9), 0.0
    model = learning([A, B])
    for turn in range(600):
        now += 0.1
        model.observe_prefill(A, Prefill(3_000, 4_000), takes(Prefill(3_000, 4_000), truth), now)
        short = Prefill(100 + turn % 200, 1_000)
        seconds = takes(short, truth) + (together - 1) * (takes(short, truth) - truth[0])
        for each in (seconds, *[0.0] * (together - 1)):
            model.observe_prefill(B, short, each, now)
    assert factor(model, now, B) / factor(model, now, A) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("seen", "taken"), [(1.05, 1.003), (1.2, 1.09), (2.0, 1.9), (4.0, 3.9)])
def test_what_is_far_from_usual_is_believed_and_what_is_near_is_not(seen: float, taken: float) -> None:
    assert believed(seen) == pytest.approx(taken, rel=0.01)
    assert believed(1 / seen) == pytest.approx(1 / taken, rel=0.01)


def step_time(requests: int, tokens: int, truth: tuple[float, float, float] = STEP_TRUTH) -> float:
    return truth[0] + truth[1] * requests + truth[2] * tokens


def run_steps(model: LatencyModel, slowness: dict[WorkerRank, float]) -> float:
    """Returns when it ended."""
    source, now = random.Random(4), 0.0
    for _ in range(400):
        requests = source.randrange(1, 100)
        tokens = requests * source.randrange(50, 5_000)
        now += 16 * step_time(requests, tokens)
        for each, factor in slowness.items():
            if model.observe_steps(each, 16, 16 * step_time(requests, tokens) * factor, now):
                model.fold_steps(each, requests, tokens, now)
    return now


def between_tokens(model: LatencyModel, requests: int, tokens: int, now: float, on: WorkerRank = A) -> float:
    return float(step_seconds(model, RankSet([on]), np.array([requests - 1]), np.array([tokens]), 0, now)[0])


@pytest.mark.parametrize(("requests", "tokens"), STEPS)
def test_a_steps_parts_are_found_again(requests: int, tokens: int) -> None:
    model = learning()
    now = run_steps(model, {A: 1.0})
    assert between_tokens(model, requests, tokens, now) == pytest.approx(step_time(requests, tokens), rel=0.25)


def test_who_decodes_slowly_is_known_apart() -> None:
    model = learning()
    now = run_steps(model, {A: 2.0, B: 1.0})
    slow, usual = (between_tokens(model, 30, 60_000, now, each) for each in (A, B))
    assert 1.5 < slow / usual < 2.3


def test_steps_of_a_quarter_second_make_one_sample() -> None:
    model = learning()
    assert not model.observe_steps(A, 1, 0.02, 10.0)
    assert not model.observe_steps(A, 1, 0.02, 10.2)
    assert model.observe_steps(A, 1, 0.02, 10.25)
    model.fold_steps(A, 1, 100, 10.25)
    model.fold_steps(A, 1, 100, 10.25)  # nothing was seen since
    assert not model.observe_steps(A, 1, 0.02, 10.3)


def test_single_steps_that_take_what_was_expected_change_nothing() -> None:
    model, expected = learning(), step_time(20, 60_000, STEP_PRIOR)
    for now in range(100):
        model.observe_steps(A, 1, expected, now)
        model.fold_steps(A, 20, 60_000, now)
    assert between_tokens(model, 20, 60_000, 100.0) == pytest.approx(expected)


def test_residence_follows_slowly() -> None:
    model = learning()
    for _ in range(500):
        model.observe_residence(1.0)
    assert model.residence == pytest.approx(1.0, abs=0.1)
    model.observe_residence(20.0)
    assert 1.0 < model.residence < 2.0


def test_the_mean_answer_is_learned_as_the_mean_residence_is() -> None:
    model = LatencyModel()
    assert model.answer_tokens == 0.0
    for tokens in (900, 1_000, 1_100) * 30:
        model.observe_answer(tokens)
    assert model.answer_tokens == pytest.approx(1_000, rel=0.05)


def test_the_first_residences_count_more_than_the_prior() -> None:
    """Else a wait for the end of requests of 0.2 s is taken for one of seconds."""
    model = learning()
    for _ in range(20):
        model.observe_residence(0.2)
    assert model.residence < RESIDENCE_PRIOR / 10


samples = st.tuples(st.integers(0, 50_000), st.integers(0, 50_000), st.floats(0, 1e4))


@repeatable
@given(st.lists(samples, max_size=60))
def test_whatever_is_observed_predictions_stay_positive_and_finite(seen: list[tuple[int, int, float]]) -> None:
    model, shape = learning([A]), Shape(PREFILL_PRIOR)
    for number, (new, cached, seconds) in enumerate(seen):
        prefill = Prefill(new, new + cached)
        model.observe_prefill(A, prefill, seconds, float(number))
        shape.observe(1.0, prefill.new, prefill.pairs, seconds)
    for prefill in PROMPTS:
        assert 0 < predicted(model, prefill, 60.0) < 1e9
        assert 0 < shape.expected(1.0, prefill.new, prefill.pairs) < 1e9
