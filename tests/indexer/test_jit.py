from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import CacheImpl, IndexDataCacheFile

from indexer import jit
from indexer.jit import kernel


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_not_kept", [])


def test_a_kernel_runs_where_there_is_no_room_to_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def twice(number: int) -> int:
        return 2 * number

    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    compiled = kernel(twice)
    assert jit.all_kept()
    assert compiled(4) == 8
    assert not jit.all_kept()


def test_a_kernel_that_no_folder_can_keep_runs_too_and_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(number: int) -> int:
        return 2 * number

    kernel(twice)
    assert jit.all_kept()
    for locator in CacheImpl._locator_classes:
        monkeypatch.setattr(locator, "ensure_cache_path", forbidden)
    assert kernel(twice)(4) == 8
    assert not jit.all_kept()


def forbidden(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


MODULE = """
from indexer.jit import kernel

@kernel
def twice(number):
    return 2 * number
"""


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """The kernel `twice` as a process has it that has just started; what it keeps is in `tmp_path`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    (tmp_path / "with_a_kernel.py").write_text(MODULE)

    def start() -> Any:
        monkeypatch.delitem(sys.modules, "with_a_kernel", raising=False)
        return importlib.import_module("with_a_kernel").twice

    return start


def hits(kernel: Any) -> int:
    return sum(kernel.stats.cache_hits.values())


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_file_of_a_kept_kernel_is_made_anew(
    anew: Callable[[], Any], tmp_path: Path, kind: str, left: int
) -> None:
    anew()(4)
    (file,) = tmp_path.rglob(f"*.{kind}")
    file.write_bytes(file.read_bytes()[:left])
    damaged = anew()
    assert damaged(4) == 8
    assert not hits(damaged)
    mended = anew()
    assert mended(4) == 8
    assert hits(mended) == 1


def test_a_kept_kernel_that_may_not_be_read_is_compiled(
    anew: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another user has kept it."""
    anew()(4)
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", forbidden)
    assert anew()(4) == 8


@pytest.mark.parametrize(
    ("content", "found"), [(MODULE, 1), (MODULE.replace("2 *", "3 *"), 0)], ids=["same", "changed"]
)
def test_what_another_user_has_kept_is_found(
    anew: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, found: int
) -> None:
    """Where this one may not write: in an image, or what root has installed."""
    anew()(4)
    (tmp_path / "with_a_kernel.py").write_text(content)
    for locator in CacheImpl._locator_classes:
        monkeypatch.setattr(locator, "ensure_cache_path", forbidden)
    subject = anew()
    assert jit.all_kept() == found
    subject(4)
    assert hits(subject) == found
    assert jit.all_kept() == found
