"""How long each rank takes, learned online: seconds of a prefill, of a decode step, of a whole request.

The *shape* is common to the fleet: a prefill takes a + b · new tokens + c · pairs seconds (pairs: Σ over new tokens of
the tokens that each attends to); a decode step takes a base, a part for each sequence, and one for each token of
context.

The *factor* is each rank's own: observed over expected seconds. It shows slow, throttled and mixed hardware within
seconds, while the shape takes hundreds of requests to learn. Before there are observations the priors hold; they are
the same for all ranks, so the right order of magnitude is enough.
"""

from __future__ import annotations

import math

import numpy as np

from indexer.types import RankSet, WorkerRank
from router.scheduling.candidates import Seconds
from router.scheduling.figures import Coefficients
from router.scheduling.places import Places, Positions

PREFILL_PRIOR = (0.01, 1 / 20_000, 1e-9)
"""Seconds, per new token and per pair: an 8B model on an accelerator of 2023, 2 FLOP per parameter and token at 30 % of
10^15 FLOP/s, and 4 FLOP per pair, head dimension and layer."""
STEP_PRIOR = (0.008, 1e-4, 5e-8)
"""Seconds, per sequence and per token of context: reading 16 GB of weights, and 131 kB per token, at 2.7 TB/s."""
RESIDENCE_PRIOR = 10.0
"""Seconds from booking to release."""

_SHAPE_MEMORY = 0.995
"""Each new sample multiplies the weight of all earlier ones by this: the shape follows the last few hundred."""
_PRIOR_SAMPLES = 8.0
"""Samples that the prior counts for: it dampens a first sample that is off, and decides on features that never vary."""
_OUTLIER = 4.0
"""Samples are clipped to this factor from what was expected, either way, so that one stall does not bend the model."""
_SOLVE_EVERY = 16
"""Samples."""
_ANCHOR = 0.05
"""Weight of the prior, in samples, that is never forgotten."""
_LEAST = 0.02
"""Least share of its prior that a coefficient may have."""
_LEAST_GAIN = 0.02
"""Least weight of one request in the mean residence and the mean answer. The first ones weigh more, and the prior as
much as one of them: otherwise requests of 0.2 s would seem to take seconds until a hundred of them have ended."""
_SAME_STEP = 0.5
"""Share of a step's fixed cost: a first token that comes sooner than this after another came out of the same step."""
_FOLD_SECONDS = 0.25
"""Seconds for which decode steps of a rank are summed up to one sample."""
_REFRESH = 0.5
"""Seconds after which factors are computed anew: those of ranks that are not observed move towards the fleet's."""
_FAST, _SLOW = 5.0, 60.0
"""Seconds after which an observation of a rank's factor counts 1/e: the first to follow a change, the second to
remember the worker."""
_FAST_PRIOR, _SLOW_PRIOR = 0.3, 2.0
"""Seconds of expected work for which the slow average counts in the fast one, and the fleet's average in the slow
one."""
_DOUBTED = 0.2
"""Natural logarithm of the ratio by which equal ranks seem to differ just because of the requests they happen to get.
`auto` weighs such a difference by up to five: of eight equal ranks, two got all the long prompts
(docs/adr/0005-auto-policy.md)."""
_QUICKEST = 0.005
"""Least ratio of observed to expected seconds: a first observation near 0 must not make all later ones look endless."""
_PREFILL_DOUBT, _STEP_DOUBT = 0.05, 2.0
"""Seconds of expected work for which the prior counts beside the observations of the whole fleet."""


class Shape:
    """Least squares with forgetting and a prior, over three features; coefficients are always above 0.

    Samples are weighed by 1/expected², so that relative errors count: a short prefill tells as much as a long one.
    Plain floats instead of arrays, since each request makes an observation.
    """

    def __init__(self, prior: Coefficients) -> None:
        self._prior = prior
        diagonal = _PRIOR_SAMPLES / 3
        self._moments = [diagonal, 0.0, 0.0, diagonal, 0.0, diagonal]
        """Upper triangle of the moment matrix. Features are in units of the prior, so that all coefficients are near
        1."""
        self._targets = [diagonal] * 3
        self._fresh = 0
        self.coefficients = prior

    def expected(self, x: float, y: float, z: float) -> float:
        a, b, c = self.coefficients
        return a * x + b * y + c * z

    def observe(self, x: float, y: float, z: float, seconds: float) -> None:
        """Take a sample: three features, and the seconds that were observed."""
        expected = self.expected(x, y, z)
        if expected <= 0:
            return
        ratio = min(max(seconds / expected, 1 / _OUTLIER), _OUTLIER)
        x, y, z = (value * unit / expected for value, unit in zip((x, y, z), self._prior, strict=True))
        products = (x * x, x * y, x * z, y * y, y * z, z * z)
        self._moments = [_SHAPE_MEMORY * old + new for old, new in zip(self._moments, products, strict=True)]
        targets = (x * ratio, y * ratio, z * ratio)
        self._targets = [_SHAPE_MEMORY * old + new for old, new in zip(self._targets, targets, strict=True)]
        self._fresh += 1
        if self._fresh >= _SOLVE_EVERY:
            self._solve()

    def _solve(self) -> None:
        self._fresh = 0
        xx, xy, xz, yy, yz, zz = self._moments
        anchor = _ANCHOR * np.eye(3)  # keeps at the prior what samples cannot tell apart
        moments = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]) + anchor
        a, b, c = np.maximum(np.linalg.solve(moments, np.array(self._targets) + _ANCHOR), _LEAST).tolist()
        self.coefficients = a * self._prior[0], b * self._prior[1], c * self._prior[2]


class Factors:
    """The factor of each rank: observed over expected seconds.

    Two averages are kept of each rank. The fast one falls back on the slow one, and that on the fleet's average rather
    than on 1. Otherwise, in a fleet that is twice as slow as the shape says, a rank without observations would seem
    twice as fast as the others and get all the work; in a fleet that is faster, it would never be tried. The prior (a
    fleet that is as fast as the shape says) counts only in the fleet's *level*, which all factors are relative to.
    """

    def __init__(self, doubt: float) -> None:
        """`doubt`: seconds of expected work for which a level of 1 counts."""
        self._doubt = doubt
        self._sums: dict[int, tuple[float, float, float, float, float]] = {}
        """By place: fast observed, fast expected, slow observed, slow expected, and when they were last updated."""
        self._fleets = 1.0
        """The fleet's average: observed over expected seconds, of all ranks together."""
        self.level = 1.0
        """The same with the prior counted in; the factor of ranks that were not observed."""
        self._known = np.ones(1)
        """Factors by place. The last element stands for ranks without a place (index −1)."""
        self._refreshed = -math.inf

    def forget(self, place: int) -> None:
        if self._sums.pop(place, None):
            self._known[place] = self.level

    def reach(self, place: int) -> None:
        """Make room for `place`."""
        if place >= len(self._known) - 1:
            self._known = np.append(self._known, np.full(place + 1, self.level))

    def observe(self, place: int, observed: float, expected: float, now: float) -> None:
        """Take an observation of a place for which `reach` has made room."""
        fast_observed, fast_expected, slow_observed, slow_expected = self._decayed(place, now)
        sums = (fast_observed + observed, fast_expected + expected, slow_observed + observed, slow_expected + expected)
        self._sums[place] = (*sums, now)
        self._known[place] = self._factor(sums)

    def _decayed(self, place: int, now: float) -> tuple[float, float, float, float]:
        fast_observed, fast_expected, slow_observed, slow_expected, at = self._sums.get(
            place, (0.0, 0.0, 0.0, 0.0, now)
        )
        fast, slow = math.exp((at - now) / _FAST), math.exp((at - now) / _SLOW)
        return fast_observed * fast, fast_expected * fast, slow_observed * slow, slow_expected * slow

    def at(self, place: int) -> float:
        return float(self._known[place]) if place in self._sums else self.level

    def known(self, now: float) -> Seconds:
        """Factors by place.

        A rank without observations has the fleet's factor, and one without recent ones returns to it, so that a rank
        which is avoided for having been slow is tried again.
        """
        if now - self._refreshed > _REFRESH:
            self._refreshed = now
            self._refresh(now)
        return self._known

    def _refresh(self, now: float) -> None:
        decayed = {place: self._decayed(place, now) for place in self._sums}
        observed, expected = (sum(sums[column] for sums in decayed.values()) for column in (2, 3))
        self._fleets = max(observed / expected, _QUICKEST) if expected else 1.0
        self.level = (observed + self._doubt) / (expected + self._doubt)
        self._known[:] = self.level
        for place, sums in decayed.items():
            self._known[place] = self._factor(sums)

    def _factor(self, sums: tuple[float, float, float, float]) -> float:
        """`sums` as in `_sums`, without the time."""
        fast_observed, fast_expected, slow_observed, slow_expected = sums
        lasting = (slow_observed + _SLOW_PRIOR * self._fleets) / (slow_expected + _SLOW_PRIOR)
        own = (fast_observed + _FAST_PRIOR * lasting) / (fast_expected + _FAST_PRIOR)
        return self.level * believed(own / self._fleets)


def believed(ratio: float) -> float:
    """A ratio far from 1 is kept, one near 1 becomes 1 (see `_DOUBTED`)."""
    apart = math.log(ratio)
    return math.exp(apart**3 / (apart**2 + _DOUBTED**2))


class Prefill:
    """The work of a prefill."""

    def __init__(self, new: int, prompt: int) -> None:
        self.new = new
        """Tokens that have to be computed."""
        self.prompt = prompt

    @property
    def pairs(self) -> float:
        """Pairs of tokens that attention reads: each new token with all tokens before it."""
        return self.new * (self.prompt - self.new / 2)


class _Step:
    """The prefills that one step of a rank has computed together."""

    def __init__(self, factor: float, new: int = 0, pairs: float = 0.0, seconds: float = 0.0) -> None:
        self.factor = factor
        """The rank's factor before the step."""
        self.new = new
        self.pairs = pairs
        self.seconds = seconds


class LatencyModel:
    """All times are in seconds on one steady clock."""

    def __init__(self) -> None:
        self._places = Places()
        self._prefill, self._step = Shape(PREFILL_PRIOR), Shape(STEP_PRIOR)
        self._prefill_factors, self._step_factors = Factors(_PREFILL_DOUBT), Factors(_STEP_DOUBT)
        self._latest: dict[int, _Step] = {}
        """By place: the latest step, which is not a sample yet."""
        self._steps: dict[int, tuple[int, float, float]] = {}
        """By place: decode steps that are not a sample yet, their seconds, and since when they are summed."""
        self._ended = 0
        self.residence = RESIDENCE_PRIOR
        """Mean seconds from booking to release: how long a request occupies memory."""
        self._answers = 0
        self.answer_tokens = 0.0
        """Mean tokens of an answer, as far as streams showed them."""

    def watch(self, rank: WorkerRank) -> None:
        place = self._places.add(rank)
        self._prefill_factors.reach(place)
        self._step_factors.reach(place)

    def forget(self, rank: WorkerRank) -> None:
        """Forget all about `rank`; its place may be given to another."""
        place = self._places.drop(rank)
        if place is None:
            return
        for known in (self._latest, self._steps):
            known.pop(place, None)
        self._prefill_factors.forget(place)
        self._step_factors.forget(place)
        self._places.free(place)

    # -- predictions

    def prefill_work(self, prefill: Prefill) -> float:
        """Seconds on a rank of factor 1."""
        return self._prefill.expected(1.0, prefill.new, prefill.pairs)

    def prefill_share(self, prefill: Prefill) -> float:
        """The same without the fixed cost of a step, which prefills in one step share."""
        return self._prefill.expected(0.0, prefill.new, prefill.pairs)

    def others_share(self, further: int, first: int) -> float:
        """`prefill_share` of the other prompts of a batch, `further` tokens in all, each taken to be about as long as
        the first, which has `first`."""
        return self._prefill.expected(0.0, further, further * first / 2) if further else 0.0

    def seconds_on(self, rank: WorkerRank, work: float) -> float:
        """Seconds that prefills take on `rank` which take `work` on one of factor 1; 0 for one that is not watched."""
        place = self._places.get(rank)
        return 0.0 if place is None else self._prefill_factors.at(place) * work

    def prefill_seconds_on(self, rank: WorkerRank, prefill: Prefill) -> float:
        return self.seconds_on(rank, self.prefill_work(prefill))

    def columns(self, ranks: RankSet, now: float) -> tuple[Seconds, Seconds, Positions, Coefficients, Coefficients]:
        """For `figures.work_out`: prefill factors, step factors, the positions of `ranks` in them, both shapes'
        coefficients."""
        prefills, steps = self._prefill_factors.known(now), self._step_factors.known(now)
        return prefills, steps, self._places.of(ranks), self._prefill.coefficients, self._step.coefficients

    # -- observations

    def observe_prefill(self, rank: WorkerRank, prefill: Prefill, seconds: float, now: float) -> None:
        """`rank` spent `seconds` on this prefill alone, beside its decoding.

        An engine computes several prefills in one step, and then only the first seems to have taken any time. So the
        seconds of a step are compared with the work of all its prefills together.
        """
        place = self._places.get(rank)
        if place is None:
            return
        step = self._latest.get(place)
        if step is None or seconds > _SAME_STEP * self._step_factors.at(place) * self._step.coefficients[0]:
            if step:  # half of a rank's deviation may be the shape's fault, if it gets prompts of one kind
                usual = math.sqrt(step.factor * self._prefill_factors.level)
                self._prefill.observe(1.0, step.new, step.pairs, step.seconds / usual)
            step = _Step(self._prefill_factors.at(place))
        whole = _Step(step.factor, step.new + prefill.new, step.pairs + prefill.pairs, step.seconds + seconds)
        self._latest[place] = whole
        # Both by the shape of now: by that of an earlier moment, what was added could come out as less than nothing.
        counted_before, expected_before = self._counted(step)
        counted, expected = self._counted(whole)
        self._prefill_factors.observe(place, counted - counted_before, expected - expected_before, now)

    def _counted(self, step: _Step) -> tuple[float, float]:
        """Seconds, clipped, that count towards the rank's factor, and those that were expected."""
        if not step.new:
            return 0.0, 0.0
        expected = self._prefill.expected(1.0, step.new, step.pairs)
        return min(step.seconds, _OUTLIER * expected * step.factor), expected

    def observe_steps(self, rank: WorkerRank, steps: int, seconds: float, now: float) -> bool:
        """A stream got `steps` tokens within `seconds`. Returns whether it is time for `fold_steps`."""
        place = self._places.get(rank)
        if place is None:
            return False
        known, took, since = self._steps.get(place, (0, 0.0, now))
        self._steps[place] = known + steps, took + seconds, since
        return now - since >= _FOLD_SECONDS

    def fold_steps(self, rank: WorkerRank, requests: int, active_tokens: int, now: float) -> None:
        """Make a sample of the steps observed since the last one, with `requests` and `active_tokens` on the rank."""
        place = self._places.get(rank)
        steps, took, _ = self._steps.pop(place, (0, 0.0, now)) if place is not None else (0, 0.0, now)
        if place is None or not steps:
            return
        factor, expected = self._step_factors.at(place), self._step.expected(1.0, requests, active_tokens)
        self._step.observe(1.0, requests, active_tokens, took / steps / factor)
        observed = min(took / steps / expected, _OUTLIER * factor)
        self._step_factors.observe(place, _FOLD_SECONDS * observed, _FOLD_SECONDS, now)

    def observe_answer(self, tokens: int) -> None:
        """An answer has ended after so many."""
        self._answers += 1
        self.answer_tokens += _gain(self._answers) * (tokens - self.answer_tokens)

    def observe_residence(self, seconds: float) -> None:
        """A request has ended `seconds` after it was booked."""
        self._ended += 1
        self.residence += _gain(self._ended) * (seconds - self.residence)


def _gain(number: int) -> float:
    """The weight in a mean of its latest value, the first being number 1."""
    return max(_LEAST_GAIN, 1 / (1 + number))
