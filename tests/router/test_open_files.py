from __future__ import annotations

import os
import resource

import pytest

from router.open_files import NONE_LEFT, TOO_FEW, OpenFiles, can_open, warn_if_few


@pytest.mark.parametrize(
    ("limit", "workers", "few"), [(1024, 300, False), (1024, 400, True), (resource.RLIM_INFINITY, 10_000, False)]
)
def test_too_few_open_files_for_the_workers_are_told_of(
    limit: int, workers: int, few: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    warn_if_few(workers)
    assert (TOO_FEW in caplog.text) is few


def test_it_is_told_once_a_minute_that_none_are_left(caplog: pytest.LogCaptureFixture) -> None:
    room = True
    files = OpenFiles(lambda: room)
    files.tick(0.0)
    assert NONE_LEFT not in caplog.text
    room = False
    for now in range(1, 62):
        files.tick(float(now))
    assert caplog.text.count(NONE_LEFT) == 2


def test_whether_another_can_be_opened_is_tried() -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert can_open()
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        assert not can_open()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_where_there_is_no_such_file_there_may_be_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "devnull", "/nowhere/null")
    assert can_open()
