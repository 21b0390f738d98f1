"""A process whose event loop does not turn is found out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from router.app import App
from router.processes.heartbeat import INTERVAL, STILL, Heartbeat, Standstill
from router.processes.member import Member, map_memory, memory_size
from router.settings import Settings


class Loop:
    """Its turns are the test's."""

    def __init__(self) -> None:
        self.due: list[Callable[[], object]] = []

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: object) -> None:
        assert seconds == INTERVAL
        self.due.append(lambda: callback(*arguments))

    def turn(self) -> None:
        self.due.pop()()


def test_who_beats_does_not_stand_still() -> None:
    beats, loop = np.zeros(2, np.int64), Loop()
    standstill = Standstill(beats)
    Heartbeat(beats, 1).start(loop.call_later)
    for _ in range(3 * STILL):
        assert standstill.found([1]) == []
        loop.turn()
    assert beats[0] == 0


def test_who_does_not_beat_is_found_once() -> None:
    beats, loop = np.zeros(3, np.int64), Loop()
    standstill, found = Standstill(beats), []
    for number in (0, 2):
        Heartbeat(beats, number).start(loop.call_later)
    for look in range(2 * STILL):
        loop.turn()  # of the last to start
        found += [(look, number) for number in standstill.found([0, 2])]
    assert found == [(STILL, 0)]


def test_a_process_that_was_started_again_has_all_its_time() -> None:
    """Its number is that of one that stood still."""
    standstill = Standstill(np.zeros(1, np.int64))
    for _ in range(STILL):
        assert standstill.found([0]) == []
    assert standstill.found([]) == []
    for _ in range(STILL):
        assert standstill.found([0]) == []
    assert standstill.found([0]) == [0]


async def test_the_router_beats_from_its_start_on(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as memory:
        memory.truncate(memory_size(2, 8))
        app = App(Settings(port=0), Member(1, 2, 8, memory.fileno(), str(tmp_path)))
        await app.start()
        try:
            other, own = map_memory(memory.fileno(), 2, 8).beats.tolist()
            assert other == 0 < own
        finally:
            await app.drain(0)
            await app.close()
