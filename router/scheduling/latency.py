"""How long each rank takes, learned from what was observed: seconds of a prefill, of a decode step, of a whole request.

Two parts. The *shape* is the fleet's: prefill seconds as a + b · new tokens + c · pairs (Σ over new tokens of the
tokens each attends to), a decode step as a base, a part for each sequence and one for each token of context. The
*factor* is each rank's own: how much longer than the shape says it takes, so that slow, hot and mixed hardware shows
within seconds, while the shape needs hundreds of requests. Before there is any observation, the priors hold; they only
have to be right to an order of magnitude, for they are the same for all ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from indexer.types import RankSet, WorkerRank
from router.scheduling.decision import Seconds
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
"""Of the weight of all earlier samples, with each new one: the shape follows the last few hundred."""
_PRIOR_SAMPLES = 8.0
"""Samples that the prior counts for: against a first sample that is off, and against features that never vary."""
_OUTLIER = 4.0
"""A sample further than this factor from what is expected counts as this far: one stall must not bend a model."""
_SOLVE_EVERY = 16
"""Samples."""
_ANCHOR = 0.05
"""Weight of the prior that is never forgotten, in samples."""
_LEAST = 0.02
"""No coefficient falls below this share of its prior."""
_RESIDENCE_GAIN = 0.02
"""Of one request in the mean residence."""
_SAME_STEP = 0.5
"""Of what a step takes at least: a prefill that is done sooner after another was computed in the same one."""
_FOLD_SECONDS = 0.25
"""Steps of a rank are summed for so long before they make a sample."""
_REFRESH = 0.5
_FAST, _SLOW = 5.0, 60.0
"""Seconds after which an observation of a rank's factor counts 1/e: to follow a change, and to remember a worker."""
_FAST_PRIOR, _SLOW_PRIOR = 0.3, 2.0
"""Seconds of expected work that the slow factor, and the fleet's, count for beside what was observed of the rank."""
_DOUBTED = 0.2
"""How far apart, in logarithms, ranks that are alike seem to be, with what each happens to get. `auto` weighs what is
left of it by up to five, so that of eight alike two got all the long prompts (docs/adr/0005-auto-policy.md)."""
_QUICKEST = 0.005
"""Of what is expected: a first observation of next to nothing must not make all that follow look endless."""
_PREFILL_DOUBT, _STEP_DOUBT = 0.05, 2.0
"""Seconds of expected work that the prior counts for beside what was observed of anybody."""


class Shape:
    """Least squares with forgetting and a prior, over three features; coefficients never below 0.

    Samples are weighed by 1/expected², so that relative errors count: a short prefill tells as much as a long one.
    Plain floats: an observation is made for each request.
    """

    def __init__(self, prior: Coefficients) -> None:
        self._prior = prior
        diagonal = _PRIOR_SAMPLES / 3
        self._moments = [diagonal, 0.0, 0.0, diagonal, 0.0, diagonal]
        """Upper triangle, of features in units of the prior, where all coefficients are near 1."""
        self._targets = [diagonal] * 3
        self._fresh = 0
        self.coefficients = prior

    def expected(self, x: float, y: float, z: float) -> float:
        a, b, c = self.coefficients
        return a * x + b * y + c * z

    def observe(self, x: float, y: float, z: float, seconds: float) -> None:
        """Features, and what they took."""
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
        anchor = _ANCHOR * np.eye(3)  # what the samples cannot tell apart stays where the prior has it
        moments = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]) + anchor
        a, b, c = np.maximum(np.linalg.solve(moments, np.array(self._targets) + _ANCHOR), _LEAST).tolist()
        self.coefficients = a * self._prior[0], b * self._prior[1], c * self._prior[2]


class Factors:
    """Each rank's observed over expected seconds, by two memories: the fast one leans on the slow, that on the fleet's.

    Not on 1: where all are twice as slow as the shape says, one of which nothing is known would seem twice as fast as
    the others, and get all the work; where all are quicker, it would never be tried. So whatever is left of the prior
    is in the fleet's *level*, by which all are multiplied alike.
    """

    def __init__(self, doubt: float) -> None:
        """`doubt`: seconds of expected work that 1 counts for."""
        self._doubt = doubt
        self._sums: dict[int, tuple[float, float, float, float, float]] = {}
        """By place: fast observed and expected, slow observed and expected, and when."""
        self._fleets = self.level = 1.0
        self._known = np.ones(1)
        """The last is nobody's: ranks without a place, −1, are read there."""
        self._refreshed = -math.inf

    def forget(self, place: int) -> None:
        if self._sums.pop(place, None):
            self._known[place] = self.level

    def reach(self, place: int) -> None:
        """It may be asked for from now on."""
        if place >= len(self._known) - 1:
            self._known = np.append(self._known, np.full(place + 1, self.level))

    def observe(self, place: int, observed: float, expected: float, now: float) -> None:
        """Of a place that was `reach`ed."""
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
        """By place. A rank of which nothing was observed takes what the fleet takes, and one that was not of late goes
        back to it: who is avoided for having been slow must not be avoided for ever.
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
        """`sums`: fast observed and expected, slow observed and expected."""
        fast_observed, fast_expected, slow_observed, slow_expected = sums
        lasting = (slow_observed + _SLOW_PRIOR * self._fleets) / (slow_expected + _SLOW_PRIOR)
        own = (fast_observed + _FAST_PRIOR * lasting) / (fast_expected + _FAST_PRIOR)
        return self.level * believed(own / self._fleets)


def believed(ratio: float) -> float:
    """What is far from 1 is taken as it is, what is near it for 1."""
    apart = math.log(ratio)
    return math.exp(apart**3 / (apart**2 + _DOUBTED**2))


class Prefill(NamedTuple):
    """What a prefill computes."""

    new: int
    """Tokens that no cache held."""
    prompt: int

    @property
    def pairs(self) -> float:
        """Of tokens that attention looks at: each new one with all before it."""
        return self.new * (self.prompt - self.new / 2)


class _Step(NamedTuple):
    """The prefills that came out of one step of a rank."""

    factor: float
    """The rank's, before it."""
    new: int = 0
    pairs: float = 0.0
    seconds: float = 0.0
    expected: float = 0.0
    counted: float = 0.0
    """Of the seconds, towards the rank's factor."""


class LatencyModel:
    """`now` and all times are seconds on one steady clock."""

    def __init__(self) -> None:
        self._places = Places()
        self._prefill, self._step = Shape(PREFILL_PRIOR), Shape(STEP_PRIOR)
        self._prefill_factors, self._step_factors = Factors(_PREFILL_DOUBT), Factors(_STEP_DOUBT)
        self._latest: dict[int, _Step] = {}
        """By place, not yet a sample."""
        self._steps: dict[int, tuple[int, float, float]] = {}
        """By place, not yet a sample: steps, seconds, since when."""
        self.residence = RESIDENCE_PRIOR
        """From booking to release, of a mean request: how long memory stays taken."""

    def watch(self, rank: WorkerRank) -> None:
        place = self._places.add(rank)
        self._prefill_factors.reach(place)
        self._step_factors.reach(place)

    def forget(self, rank: WorkerRank) -> None:
        """Its place may serve another, of which nothing is known."""
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
        """The same beside others, without what their step takes at least."""
        return self._prefill.expected(0.0, prefill.new, prefill.pairs)

    def prefill_seconds_on(self, rank: WorkerRank, prefill: Prefill) -> float:
        """On a rank that is watched."""
        place = self._places.get(rank)
        return 0.0 if place is None else self._prefill_factors.at(place) * self.prefill_work(prefill)

    def columns(self, ranks: RankSet, now: float) -> tuple[Seconds, Seconds, Positions, Coefficients, Coefficients]:
        """For `figures.work_out`: factors of prefills and of steps, where in them `ranks` are, and coefficients."""
        prefills, steps = self._prefill_factors.known(now), self._step_factors.known(now)
        return prefills, steps, self._places.of(ranks), self._prefill.coefficients, self._step.coefficients

    # -- observations

    def observe_prefill(self, rank: WorkerRank, prefill: Prefill, seconds: float, now: float) -> None:
        """`rank` spent `seconds` on nothing but this prefill, beside its decoding. An engine computes several in one
        step, and then only the first seems to have taken any time: what they took is held against all of them."""
        place = self._places.get(rank)
        if place is None:
            return
        step = self._latest.get(place)
        if step is None or seconds > _SAME_STEP * self._step_factors.at(place) * self._step.coefficients[0]:
            if step:  # half of what sets a rank apart may be the shape's fault, where it gets prompts of one kind
                usual = math.sqrt(step.factor * self._prefill_factors.level)
                self._prefill.observe(1.0, step.new, step.pairs, step.seconds / usual)
            step = _Step(self._prefill_factors.at(place))
        seconds += step.seconds
        self._latest[place] = whole = self._count(step, step.new + prefill.new, step.pairs + prefill.pairs, seconds)
        self._prefill_factors.observe(place, whole.counted - step.counted, whole.expected - step.expected, now)

    def _count(self, step: _Step, new: int, pairs: float, seconds: float) -> _Step:
        expected = self._prefill.expected(1.0, new, pairs)
        counted = min(seconds, _OUTLIER * expected * step.factor)
        return _Step(step.factor, new, pairs, seconds, expected, counted)

    def observe_steps(self, rank: WorkerRank, steps: int, seconds: float, now: float) -> bool:
        """A stream got `steps` tokens within `seconds`. Whether it is time to `fold_steps`."""
        place = self._places.get(rank)
        if place is None:
            return False
        known, took, since = self._steps.get(place, (0, 0.0, now))
        self._steps[place] = known + steps, took + seconds, since
        return now - since >= _FOLD_SECONDS

    def fold_steps(self, rank: WorkerRank, requests: int, active_tokens: int, now: float) -> None:
        """The steps observed of late make a sample; so many requests and tokens are on the rank."""
        place = self._places.get(rank)
        steps, took, _ = self._steps.pop(place, (0, 0.0, now)) if place is not None else (0, 0.0, now)
        if place is None or not steps:
            return
        factor, expected = self._step_factors.at(place), self._step.expected(1.0, requests, active_tokens)
        self._step.observe(1.0, requests, active_tokens, took / steps / factor)
        observed = min(took / steps / expected, _OUTLIER * factor)
        self._step_factors.observe(place, _FOLD_SECONDS * observed, _FOLD_SECONDS, now)

    def observe_residence(self, seconds: float) -> None:
        """A request has ended `seconds` after it was booked."""
        self.residence += _RESIDENCE_GAIN * (seconds - self.residence)
