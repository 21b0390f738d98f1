"""Lanes of the queue: held requests with the same candidates share a lane, which stops while those are full."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from router.scheduling.candidates import Candidates
from router.scheduling.room import Room


class HasCandidates(Protocol):
    def candidates(self) -> Candidates: ...


Who = TypeVar("Who", bound=HasCandidates)


class Lanes(Generic[Who]):
    """Numbers the lanes. A lane is there from the first request that waits for its candidates until the last of them
    has left; then its number is given to another."""

    def __init__(self) -> None:
        self._numbers: dict[Candidates, int] = {}
        self._candidates: dict[int, Candidates] = {}
        self._members: dict[int, dict[Who, None]] = {}
        self._free: list[int] = []
        self._shut: set[int] = set()
        """Lanes whose candidates had no room at the last look."""

    def __contains__(self, candidates: Candidates) -> bool:
        return candidates in self._numbers

    def number(self, candidates: Candidates) -> int:
        return self._numbers[candidates]

    def size(self, candidates: Candidates) -> int:
        """How many wait for `candidates`."""
        number = self._numbers.get(candidates)
        return 0 if number is None else len(self._members[number])

    def shut(self, candidates: Candidates) -> None:
        """None of `candidates` has room."""
        self._shut.add(self._numbers[candidates])

    def was_shut(self, candidates: Candidates) -> bool:
        return self._numbers[candidates] in self._shut

    def candidates(self, number: int) -> Candidates:
        """Those that the lane is for."""
        return self._candidates[number]

    def outdated(self) -> list[tuple[Candidates, list[Who]]]:
        """The lanes whose first request has other candidates by now: their candidates, and all who are in them."""
        lanes = [(before, self._members[number]) for number, before in self._candidates.items()]
        return [(before, list(those)) for before, those in lanes if next(iter(those)).candidates() is not before]

    def enter(self, who: Who, candidates: Candidates) -> int:
        number = self._numbers.get(candidates)
        if number is None:
            number = self._numbers[candidates] = self._free.pop() if self._free else len(self._numbers)
            self._candidates[number], self._members[number] = candidates, {}
        self._members[number][who] = None
        return number

    def leave(self, who: Who, number: int) -> None:
        members = self._members[number]
        del members[who]
        if not members:
            del self._members[number]
            del self._numbers[self._candidates.pop(number)]
            self._free.append(number)
            self._shut.discard(number)

    def open(self, room: Room | None, now: float) -> dict[int, Candidates]:
        """The lanes to look into, with their candidates as of now: those in which a candidate has room, and those in
        which none is left, whose requests have to be told. `room` None: there are no limits."""
        found = {}
        for number, members in self._members.items():
            candidates = next(iter(members)).candidates()
            if room is None or not candidates or room.find(candidates, now):
                found[number] = candidates
        self._shut = set(self._members).difference(found)
        return found
