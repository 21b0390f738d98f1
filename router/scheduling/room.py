"""Which candidates have room under the limits on concurrency.

Running requests are counted from the bookings of all router processes that share them.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from router.scheduling.candidates import Candidates, Split
from router.scheduling.decision import HeldWork
from router.scheduling.limits import Limits
from router.scheduling.load import LoadBook

Mask: TypeAlias = npt.NDArray[np.bool_]

_KEPT: Final = 64
"""Selections remembered per set of candidates: at a limit the same few workers have room again and again."""


class Roomy(NamedTuple):
    """The candidates that have room, and the positions of both their parts among those of all candidates."""

    candidates: Candidates
    whole: npt.NDArray[np.intp]
    prefills: npt.NDArray[np.intp]

    def of(self, everybody: Candidates, work: HeldWork) -> HeldWork:
        """The `work` that is held for `everybody`, restricted to these."""
        found = {}
        positions = (self.whole, self.prefills)
        # Those with room may have only the first part: then nobody can prefill for others.
        for some, all_, kept in zip(self.candidates.parts, everybody.parts, positions, strict=False):
            if all_ in work:
                found[some] = work[all_][kept]
        return found


class Room:
    def __init__(self, limits: Limits, book: LoadBook) -> None:
        self._limits = limits
        self._book = book
        self._workers: WeakKeyDictionary[Candidates, npt.NDArray[np.intp]] = WeakKeyDictionary()
        """For each candidate the number of its worker."""
        self._selections: WeakKeyDictionary[Candidates, dict[bytes, Roomy]] = WeakKeyDictionary()

    def find(self, candidates: Candidates, now: float) -> Roomy | None:
        """None if no candidate has room."""
        most = self._limits.max_concurrency
        if most is not None and self._book.own_requests() >= most:
            return None
        whole, split = self._mask(candidates.whole, now), candidates.split
        prefills = self._mask(split.prefills, now) if split else _NONE
        decodes = {ranks: self._mask(ranks, now) for ranks in split.decodes} if split else {}
        masks = (whole, prefills, *decodes.values())
        if all(mask.all() for mask in masks):
            return Roomy(candidates, np.arange(len(whole)), np.arange(len(prefills)))
        known = self._selections.setdefault(candidates, {})
        key = b"".join(mask.tobytes() for mask in masks)
        found = known.get(key)
        if found is None:
            if len(known) >= _KEPT:
                known.clear()
            found = known[key] = _select(candidates, whole, prefills, decodes)
        return found if found.candidates else None

    def decodes(self, split: Split, now: float) -> Split:
        """`split` with only the decode ranks that have room, or all if none has: a computed prompt must continue."""
        if self._limits.max_worker_concurrency is None:
            return split
        masks = {ranks: self._mask(ranks, now) for ranks in split.decodes}
        masks = {ranks: mask if mask.any() else ~mask for ranks, mask in masks.items()}
        if all(mask.all() for mask in masks.values()):
            return split
        decodes = {ranks: _those(ranks, mask) for ranks, mask in masks.items()}
        near = zip(split.near, split.decodes, strict=True)
        return split._replace(
            decodes=tuple(decodes[ranks] for ranks in split.decodes),
            near=tuple(flags[masks[ranks]] for flags, ranks in near),
        )

    def _mask(self, candidates: Candidates, now: float) -> Mask:
        """Which of `candidates` are of workers with room."""
        most = self._limits.max_worker_concurrency
        if most is None:
            return np.ones(len(candidates), np.bool_)
        workers = self._workers.get(candidates)
        if workers is None:
            names = [rank.worker_id for rank in candidates.ranks]
            workers = self._workers[candidates] = np.unique(names, return_inverse=True)[1]
        own = self._book.loads(candidates, now).own_requests
        mask: Mask = (np.bincount(workers, own) < most)[workers]
        return mask


_NONE: Mask = np.zeros(0, np.bool_)


def _select(candidates: Candidates, whole: Mask, prefills: Mask, decodes: dict[Candidates, Mask]) -> Roomy:
    """The candidates that the masks keep. A prefill rank is kept if it can also hand over to a rank with room."""
    split = candidates.split
    kept = np.array([ok and decodes[to].any() for ok, to in zip(prefills, split.decodes, strict=True)] if split else [])
    places = np.flatnonzero(kept)
    smaller = _split(split, places, decodes) if split and len(places) else None
    return Roomy(_those(candidates.whole, whole, smaller), np.flatnonzero(whole), places)


def _split(split: Split, places: npt.NDArray[np.intp], decodes: dict[Candidates, Mask]) -> Split:
    """The prefill ranks at `places`, with the decode ranks that `decodes` keeps."""
    smaller = {ranks: _those(ranks, mask) for ranks, mask in decodes.items()}
    kept = places.tolist()
    mask = np.isin(np.arange(len(split.prefills)), places)
    return Split(
        _those(split.prefills, mask),
        tuple(smaller[split.decodes[place]] for place in kept),
        tuple(split.near[place][decodes[split.decodes[place]]] for place in kept),
        tuple(split.pushes[place] for place in kept),
        split.connectors,
    )


def _those(candidates: Candidates, mask: Mask, split: Split | None = None) -> Candidates:
    """The candidates that `mask` keeps, the same object if it keeps all; with `split`, which is not restricted."""
    if mask.all() and split is None:
        return candidates
    kept = np.flatnonzero(mask).tolist()
    ranks, sizes = candidates.ranks, candidates.block_sizes.tolist()
    without_store = {ranks[place] for place in kept if not candidates.uses_store[place]}
    return Candidates(((ranks[place], sizes[place]) for place in kept), split, without_store)
