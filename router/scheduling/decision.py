"""What goes into a choice and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.types import RankSet, WorkerRank

Figures: TypeAlias = npt.NDArray[np.integer[Any]]
"""One number for each candidate, in their order."""
Costs: TypeAlias = npt.NDArray[np.floating[Any]]


class Candidates(RankSet):
    """The ranks that could serve a request, in the order of their names, each with its block size in tokens."""

    def __init__(self, ranks: Iterable[tuple[WorkerRank, int]]) -> None:
        pairs = list(ranks)
        super().__init__(rank for rank, _ in pairs)
        self.block_sizes: Figures = np.array([size for _, size in pairs], np.int64)


class Situation(Protocol):
    """All that a policy may look at; each figure is worked out when it is first asked for."""

    @property
    def candidates(self) -> Candidates:
        """Never empty."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def requests(self) -> Figures:
        """In flight."""

    @property
    def prefill_tokens(self) -> Figures:
        """Prompt tokens still to compute of requests without a first token."""

    @property
    def active_tokens(self) -> Figures:
        """Tokens of all requests in flight: what decoding reads at each step."""

    @property
    def overlap_tokens(self) -> Figures:
        """Leading prompt tokens held, in any tier."""

    @property
    def credit_tokens(self) -> Figures | Costs:
        """The same, weighed by how cheap each tier is to use."""


class Choice(NamedTuple):
    """A policy's answer: which candidate, what each would have cost (lower is better; None where nothing costs)."""

    position: int
    costs: Costs | None
    reason: str


class Uniform(Protocol):
    """The randomness that policies may use (`random.Random` satisfies it)."""

    def random(self) -> float: ...


class Policy(Protocol):
    def choose(self, situation: Situation, random: Uniform) -> Choice: ...


class Decision:
    """A choice that explains itself. `overlap_tokens` None: no overlap was looked up."""

    __slots__ = ("_candidates", "_costs", "best_overlap_tokens", "overlap_tokens", "prompt_tokens", "rank", "reason")

    def __init__(
        self,
        candidates: Candidates,
        choice: Choice,
        prompt_tokens: int,
        overlap_tokens: int | None,
        best_overlap_tokens: int | None,
    ) -> None:
        """`best_overlap_tokens`: the longest overlap that any candidate had."""
        self._candidates = candidates
        self._costs = choice.costs
        self.rank = candidates.ranks[choice.position]
        self.reason = choice.reason
        self.prompt_tokens = prompt_tokens
        self.overlap_tokens = overlap_tokens
        self.best_overlap_tokens = best_overlap_tokens

    def __repr__(self) -> str:
        return (
            f"<Decision for {self.rank}: {self.reason}, overlap {self.overlap_tokens} of {self.prompt_tokens} tokens>"
        )

    @property
    def costs(self) -> Mapping[WorkerRank, float]:
        """What each candidate would have cost; {} where nothing costs."""
        costs = [] if self._costs is None else self._costs.tolist()
        return dict(zip(self._candidates.ranks, costs, strict=False))

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the chosen rank has to compute."""
        return max(0, self.prompt_tokens - (self.overlap_tokens or 0))
