"""What goes into a choice and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from indexer.types import WorkerRank
from router.scheduling.load import Load


class Candidate(NamedTuple):
    """A rank that could serve the request."""

    rank: WorkerRank
    load: Load
    overlap_tokens: int = 0
    """Leading prompt tokens that it holds, in any tier."""
    credit_tokens: float = 0.0
    """The same, weighed by how cheap each tier is to use."""


class Choice(NamedTuple):
    """A policy's answer: which candidate, what each would have cost (lower is better; {} where it does not cost)."""

    position: int
    costs: Mapping[WorkerRank, float]
    reason: str


class Uniform(Protocol):
    """The randomness that policies may use (`random.Random` satisfies it)."""

    def random(self) -> float: ...


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int, random: Uniform) -> Choice:
        """Pick one of `candidates` (never empty)."""


class Decision(NamedTuple):
    """A choice that explains itself. `overlap_tokens` None: no overlap was looked up."""

    rank: WorkerRank
    reason: str
    costs: Mapping[WorkerRank, float]
    prompt_tokens: int
    overlap_tokens: int | None
    best_overlap_tokens: int | None
    """The longest overlap that any candidate had."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the chosen rank has to compute."""
        return max(0, self.prompt_tokens - (self.overlap_tokens or 0))
