from __future__ import annotations

import errno
import os

import pytest
from numba.core.caching import IndexDataCacheFile

from indexer.jit import kernel


def test_a_kernel_runs_where_there_is_no_room_to_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def twice(number: int) -> int:
        return 2 * number

    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    assert kernel(twice)(4) == 8
