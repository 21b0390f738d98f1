"""Requests at a desk that come, wait, end and leave in any order."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.router.scheduling.waiting import Desk, Request


class Comings(RuleBasedStateMachine):
    """How they come is for whoever derives from this."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.desk = desk
        self.all: list[Request] = []
        self.gone: set[Request] = set()
        self.ended: set[Request] = set()

    def those(self, fate: str) -> list[Request]:
        return [each for each in self.all if each not in self.gone | self.ended and each.fate == fate]

    def end_all(self) -> None:
        """All that were sent."""
        for request in self.those("sent"):
            self.ended.add(request)
            request.end()

    @precondition(lambda self: self.those("sent"))
    @rule(data=st.data(), at_once=st.booleans())
    def end(self, data: st.DataObject, at_once: bool) -> None:
        request = data.draw(st.sampled_from(self.those("sent")))
        self.ended.add(request)
        assert request.booking
        request.booking.release(self.desk.clock.now)
        if at_once:
            self.desk.clock.run()

    @precondition(lambda self: self.those("waits"))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.those("waits")))
        self.gone.add(request)
        self.desk.queue.withdraw(request)

    @invariant()
    def who_waits_is_known_and_nobody_else(self) -> None:
        assert len(self.desk.queue) == len(self.those("waits"))

    @invariant()
    def who_left_is_not_sent(self) -> None:
        assert {request.fate for request in self.gone} <= {"waits"}
