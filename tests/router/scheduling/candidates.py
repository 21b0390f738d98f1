"""Candidates and randomness, made for a test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import settings

from indexer.types import WorkerRank
from router.scheduling.decision import Candidate
from router.scheduling.load import Load

repeatable = settings(derandomize=True, deadline=None)
"""The same examples in every run, however slow the machine."""

ALMOST_ONE = 1 - 2**-53
"""The greatest value that `random()` can return."""


class Scripted:
    """Returns the given values in turn; more calls than values is an error."""

    def __init__(self, values: Iterable[float]) -> None:
        self._values = list(values)

    def random(self) -> float:
        return self._values.pop(0)

    @property
    def left(self) -> int:
        return len(self._values)


def rank(name: str, dp_rank: int = 0) -> WorkerRank:
    return WorkerRank(name, dp_rank)


def candidate(
    name: str, *, requests: int = 0, pending: int = 0, active: int = 0, overlap: int = 0, credit: float | None = None
) -> Candidate:
    return Candidate(rank(name), Load(requests, pending, active), overlap, overlap if credit is None else credit)


def with_requests(counts: Sequence[int]) -> list[Candidate]:
    """One candidate for each count of requests in flight, named a, b, c …"""
    return [candidate(chr(ord("a") + index), requests=count) for index, count in enumerate(counts)]


def chi_square(observed: Sequence[int], shares: Sequence[float]) -> float:
    """How far counts are from what `shares` (which sum to 1) make likely. Below 35 for up to ten counts, but for one
    time in ten thousand; seeds are fixed, so a test that passes once always passes.
    """
    total = sum(observed)
    return sum((seen - total * share) ** 2 / (total * share) for seen, share in zip(observed, shares, strict=True))
