"""The plane inside one process, where it differs from a broker."""

from __future__ import annotations

import pytest

from publishers import local_plane
from publishers.local_plane import LocalPlane


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
