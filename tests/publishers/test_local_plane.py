"""The plane inside one process, where it differs from a broker."""

from __future__ import annotations

import pytest

from publishers import local_plane
from publishers.local_plane import TURN, LocalPlane
from tests.fakes.waiting import other_work


async def test_workers_that_come_and_go_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_plane, "MOST_SUBJECTS", 2)
    plane = LocalPlane()
    await plane.start()
    taken: list[bytes] = []
    await plane.subscribe("kv.>", taken.append)
    said = [b"%d" % number for number in range(9)]
    for number, payload in enumerate(said):
        plane.publish(f"kv.worker-{number}", payload)
        assert len(plane._takers) <= 2
    assert taken == said


async def test_others_have_their_turn_between_the_parts_of_a_long_answer() -> None:
    """All parts of a snapshot were applied in one go, in which no stream went on."""
    plane = LocalPlane()
    await plane.start()
    await plane.serve("kv.replay", lambda _: [bytes(TURN // 4)] * 40)

    with other_work() as turns:
        parts = [part async for part in plane.request("kv.replay", b"")]
    assert len(parts) == 40
    assert turns.taken >= 8
