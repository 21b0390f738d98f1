"""How many of the held requests one pass of the queue considers, and which: it blocks the event loop for about a
millisecond at most, however many are held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from router.scheduling.candidates import Candidates
from router.scheduling.line import Spot
from router.scheduling.waiting import Waiting

MOST: Final = 8
"""Most requests with the same candidates that one pass considers wherever they would go, and most that it considers as
the first for their rank."""
MOST_IN_ALL: Final = 4 * MOST
"""Most of either that a pass considers in all, and most sets of candidates that it looks into. Where there are more,
passes that follow at once go round all of them."""


class PassBudget:
    """What one pass may still consider, and what it has considered. Lanes that have come to have the same candidates
    share one budget."""

    def __init__(self, open_: Mapping[int, Candidates], seen: set[Candidates]) -> None:
        """`open_`: the lanes that the pass looks into, with their candidates as of now. `seen`: sets of candidates that
        the passes of this round have looked into; it is kept up to date."""
        self.lanes = open_
        sets = set(open_.values())
        seen &= sets
        self._seen = seen
        self._unseen = sets - seen
        """Sets that may still get their share of the budget, in the order of their first requests."""
        self._each = min(MOST, MOST_IN_ALL // max(1, len(sets)) or 1)
        self._sets_left = MOST_IN_ALL
        self._anywhere: dict[Candidates, int] = {}
        """How many requests may still be considered wherever they would go."""
        self._by_rank: dict[Candidates, int] = {}
        """And how many as the first for their rank, once those are spent."""
        self._taken: set[tuple[Candidates, int, int]] = set()
        """Ranks (as candidates, part and position) that have had their first request: one that was considered for the
        rank is still held."""
        self.considered: set[Waiting] = set()
        self.passed_over: dict[int, list[Waiting]] = {}
        """By lane: not considered, and their work not counted yet as being ahead of others."""
        self.counted: set[Waiting] = set()
        """Those whose work is counted, or need not be: the requests that were considered, sent or not, and those that
        were passed over before one that was."""
        self.cut_short = False
        """Whether requests were passed over for want of budget."""

    @property
    def exhausted(self) -> bool:
        return not self._by_rank and not (self._unseen and self._sets_left)

    @property
    def round_is_over(self) -> bool:
        """Whether each set was looked into, by this pass or those before."""
        return not self._unseen

    def may_consider(self, spot: Spot) -> bool:
        lane, part, position = spot
        candidates = self.lanes[lane]
        if candidates in self._unseen and self._sets_left:
            self._sets_left -= 1
            self._unseen.discard(candidates)
            self._seen.add(candidates)
            self._anywhere[candidates] = self._by_rank[candidates] = self._each
        if candidates in self._anywhere:
            return True
        return candidates in self._by_rank and (candidates, part, position) not in self._taken

    def pass_over(self, waiting: Waiting, lane: int) -> None:
        self.passed_over.setdefault(lane, []).append(waiting)

    def spend(self, waiting: Waiting, before: Spot, after: Spot | None, had_room: bool) -> None:
        """`waiting` was considered. `before`, `after`: its lane and target then and now; `after` None: it was sent or
        refused. `had_room`: whether any of its candidates had room; if not, the pass is done with them."""
        candidates = self.lanes[before[0]]
        self.considered.add(waiting)
        self.counted.add(waiting)
        if after:
            _, part, position = after
            self._taken.add((candidates, part, position))
        left = self._anywhere if candidates in self._anywhere else self._by_rank
        left[candidates] -= 1
        if not left[candidates]:
            del left[candidates]
            self.cut_short = True
        if not had_room:
            self._anywhere.pop(candidates, None)
            self._by_rank.pop(candidates, None)
