"""Admission: a request that is predicted to miss its objective is refused before any work is done for it, or held.

Only predictions count, and they are made anew for each request, so there is no state that could latch. A request whose
rank is idle is always taken: a rank that gets nothing could never show that it has recovered. The reasons for refusing
held requests are here too.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Literal, NamedTuple

from router.scheduling.decision import Prediction

SloAction = Literal["reject", "queue"]


class Objectives(NamedTuple):
    """In seconds; None: no objective."""

    ttft: float | None = None
    """From arrival to first token; with `--slo-action queue`, from the moment when the request is sent to a worker."""
    tbt: float | None = None
    """Between two tokens."""


NO_OBJECTIVES = Objectives()


class Refusal(NamedTuple):
    """A request would miss its objective."""

    objective: Literal["ttft", "tbt"]
    predicted: float
    """Seconds."""
    limit: float
    waited: float

    @property
    def code(self) -> str:
        return f"{self.objective}_slo"

    @property
    def retry_after(self) -> int:
        """Seconds until enough of the work ahead of the request is done for it to be taken."""
        return max(1, math.ceil(self.predicted - self.limit))


class QueueFull(NamedTuple):
    """A request is not held because too many are."""

    held: int
    retry_after: int
    """Seconds."""

    @property
    def code(self) -> str:
        return "queue_full"


class QueueTimeout(NamedTuple):
    """A request was held for too long."""

    waited: float
    limit: float
    retry_after: int

    @property
    def code(self) -> str:
        return "queue_timeout"


class Verdict(Enum):
    ADMIT = "admit"
    HOLD = "hold"


class Admission:
    def __init__(
        self, objectives: Objectives = NO_OBJECTIVES, action: SloAction = "reject", patience: float = 10.0
    ) -> None:
        """`patience`: seconds for which the action `queue` holds a request before it is refused."""
        self.objectives = objectives
        self._action = action
        self._patience = patience

    def judge(self, predicted: Prediction, waited: float, ttft: float | None = None) -> Verdict | Refusal:
        """`waited`: seconds in the router so far. `ttft`: the request's own objective, in place of the general one."""
        if predicted.idle:
            return Verdict.ADMIT
        refusal = self._violation(predicted, waited, ttft)
        if refusal is None:
            return Verdict.ADMIT
        return Verdict.HOLD if self._action == "queue" and waited < self._patience else refusal

    def missed(self, waited: float, ttft: float | None = None) -> Refusal | None:
        """The refusal of a request whose objective has already passed; None while it has not."""
        limit = self.limit(ttft)
        return None if waited <= limit else Refusal("ttft", waited, limit, waited)

    def limit(self, ttft: float | None = None) -> float:
        """Seconds in the router after which the objective is missed whatever is predicted."""
        limit = self._patience if self._action == "queue" else ttft or self.objectives.ttft
        return math.inf if limit is None or not self.concerns(ttft) else limit

    def ttft_left(self, waited: float, ttft: float | None = None) -> float:
        """The longest predicted TTFT, in seconds, at which a request that has `waited` in the router is still taken."""
        limit = ttft or self.objectives.ttft
        return math.inf if limit is None else limit - self._counted(waited)

    def concerns(self, ttft: float | None) -> bool:
        """Whether any objective applies to a request with `ttft` of its own (None: the general ones; `math.inf`:
        none)."""
        return ttft != math.inf and (ttft is not None or self.objectives != NO_OBJECTIVES)

    def _violation(self, predicted: Prediction, waited: float, ttft: float | None) -> Refusal | None:
        limit, tbt = ttft or self.objectives.ttft, self.objectives.tbt
        expected = predicted.ttft + self._counted(waited)
        if limit is not None and expected > limit:
            return Refusal("ttft", expected, limit, waited)
        if tbt is not None and predicted.tbt > tbt:
            return Refusal("tbt", predicted.tbt, tbt, waited)
        return None

    def _counted(self, waited: float) -> float:
        """How much of the wait counts towards the TTFT; see `Objectives.ttft`."""
        return 0.0 if self._action == "queue" else waited
