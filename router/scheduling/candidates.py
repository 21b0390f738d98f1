"""The candidates of a request: the ranks that could serve it, alone or in two parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from indexer.types import RankSet, WorkerRank

Figures: TypeAlias = npt.NDArray[np.integer[Any]]
"""One number for each candidate, in their order."""
Costs: TypeAlias = npt.NDArray[np.floating[Any]]
Seconds: TypeAlias = npt.NDArray[np.float64]


class Candidates(RankSet):
    """The ranks that could serve a request, in the order of their names, each with its block size in tokens.

    With `split`, pairs of ranks could also serve it in two parts (prefill and decode). Candidates are truthy when
    anything can serve the request, even if only such pairs can.
    """

    def __init__(
        self,
        ranks: Iterable[tuple[WorkerRank, int]],
        split: Split | None = None,
        without_store: Collection[WorkerRank] = (),
    ) -> None:
        """`without_store`: ranks that do not load from a shared store."""
        pairs = list(ranks)
        super().__init__(rank for rank, _ in pairs)
        self.block_sizes: npt.NDArray[np.int64] = np.array([size for _, size in pairs], np.int64)
        self.uses_store = np.array([rank not in without_store for rank, _ in pairs], np.bool_)
        """Which of them load from a shared store what they do not hold themselves."""
        self.split = split
        self.whole: Candidates = self if split is None else Candidates(pairs, None, without_store)
        """The ranks that could serve the request alone."""

    def __bool__(self) -> bool:
        return self.split is not None or len(self) > 0

    @property
    def parts(self) -> tuple[Candidates, ...]:
        """The ranks that could serve the request whole and, with `split`, those that could prefill it for others. A
        choice is a position in one of the two."""
        return (self.whole,) if self.split is None else (self.whole, self.split.prefills)


class Split(NamedTuple):
    """The ranks that could serve a request in two parts. All fields but the first and last have one entry per prefill
    rank."""

    prefills: Candidates
    decodes: tuple[Candidates, ...]
    """Where each prefill rank can hand over to; never empty. Prefill ranks with the same choice share one object."""
    near: tuple[npt.NDArray[np.bool_], ...]
    """Which of these decode ranks are on the prefill rank's host."""
    pushes: tuple[bool, ...]
    """Whether KV is sent while it is computed, so that only a tail is left when the prefill is done."""
    connectors: frozenset[str] = frozenset()
    """Names of the connectors that move KV between them."""
