from __future__ import annotations

import resource

import pytest

from router.open_files import TOO_FEW, warn_if_few


@pytest.mark.parametrize(
    ("limit", "workers", "few"), [(1024, 300, False), (1024, 400, True), (resource.RLIM_INFINITY, 10_000, False)]
)
def test_too_few_open_files_for_the_workers_are_told_of(
    limit: int, workers: int, few: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    warn_if_few(workers)
    assert (TOO_FEW in caplog.text) is few
