"""Requests of a rank that only decode, of which a step looks at those few that have something to do.

A decoding request takes one token a step; for most steps that changes nothing but two counts. Here it is looked at only
where a block begins or fills, where somebody hears of its token, and at its end; its counts are brought up to date
then. What comes of it is exactly what looking at each in every step would give.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.sim.request import Request


class _Member:
    __slots__ = ("due", "number", "request", "step")

    def __init__(self, request: Request, number: int, step: int) -> None:
        self.request = request
        self.number = number
        self.step = step
        """At whose beginning the request's counts were right."""
        self.due = step


class Decoding:
    """`every`: somebody hears of the positions that are its multiples. Members stay in the order of their joining."""

    def __init__(self, block_size: int, every: int, answers: Sequence[int]) -> None:
        self._block_size = block_size
        self._every = every
        self._answers = answers
        self._step = 0
        self._joined = 0
        self._members: dict[Request, _Member] = {}
        self._calendar: dict[int, list[_Member]] = {}
        self._looked_at: list[_Member] = []
        self.context = 0
        """Σ over members of the tokens that each attends to in the coming step."""

    def __len__(self) -> int:
        return len(self._members)

    def idle(self, running: int) -> bool:
        """Whether all that are running are members, and none of them has anything to do in the coming step."""
        return len(self._members) == running and self._step not in self._calendar

    def due(self) -> list[Request]:
        """Members that the coming step must look at, with their counts right."""
        members = [member for member in self._calendar.pop(self._step, ()) if member.due == self._step]
        members.sort(key=lambda member: member.number)
        for member in members:
            self._catch_up(member)
        self._looked_at = members
        return [member.request for member in members]

    def advance(self) -> None:
        """The step is made. For each that was due its counts follow, and `keep` or `leave`."""
        self._step += 1
        for member in self._looked_at:
            member.step = self._step
        self._looked_at = []
        self.context += len(self._members)

    def keep(self, request: Request) -> None:
        """Its counts are right for the coming step; it joins, if it was no member."""
        member = self._members.get(request)
        if member is None:
            self._joined += 1
            member = self._members[request] = _Member(request, self._joined, self._step)
            self.context += request.computed + 1
        member.step = self._step
        member.due = self._step + self._idle_steps(request)
        self._calendar.setdefault(member.due, []).append(member)

    def _idle_steps(self, request: Request) -> int:
        size, computed, generated = self._block_size, request.computed, request.generated
        block = min(-computed % size, -(computed + 1) % size)
        return min(block, -generated % self._every, request.max_tokens - 1 - generated)

    def leave(self, request: Request) -> None:
        """Nothing happens when it is no member."""
        member = self._members.pop(request, None)
        if member is not None:
            self.context -= request.computed + self._step - member.step + 1
            member.due = -1

    def dissolve(self) -> None:
        """All leave, with their counts right."""
        for member in self._members.values():
            self._catch_up(member)
        self._members.clear()
        self._calendar.clear()
        self._looked_at = []
        self.context = 0

    def _catch_up(self, member: _Member) -> None:
        request, answers, length = member.request, self._answers, len(self._answers)
        begin = request.answer_start + request.generated
        missed = self._step - member.step
        request.tokens += [answers[at % length] for at in range(begin, begin + missed)]
        request.computed += missed
        member.step = self._step
