"""Compiling in several processes at the first start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numba
import pytest

from indexer import jit
from publishers.compiling_apart import compiled_apart

pytestmark = pytest.mark.slow


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its `warm_up` writes who called it, and then does what the test asks for."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (tmp_path / "to_be_compiled.py").write_text(
        "import os, pathlib, then\n"
        "def warm_up():\n"
        f"    pathlib.Path({str(tmp_path / 'called')!r}).write_text(str(os.getpid()))\n"
        "    then.do()\n"
    )
    (tmp_path / "then.py").write_text("def do(): pass\n")
    return "to_be_compiled"


def compile_something() -> None:
    numba.njit(lambda number: number + 1)(1)


def be_ended_meanwhile(called: Path) -> None:
    compile_something()
    while not called.exists() or not called.read_text():
        os.sched_yield()
    raise SystemExit(0)


def caller(tmp_path: Path) -> int:
    return int((tmp_path / "called").read_text())


def test_what_another_process_compiles_is_done_at_the_end(module: str, tmp_path: Path) -> None:
    """It has much to do yet when this one has done its part."""
    told, done = tmp_path / "told", tmp_path / "done"
    os.mkfifo(told)
    then = f"def do():\n    open({str(told)!r}).read()\n    import numba\n    open({str(done)!r}, 'w').close()\n"
    (tmp_path / "then.py").write_text(then)
    with compiled_apart([module]):
        compile_something()
        compile_something()
        told.write_text("")
    assert done.exists()
    assert caller(tmp_path) != os.getpid()


def test_without_anything_to_compile_no_process_is_started(module: str, tmp_path: Path) -> None:
    with compiled_apart([module]):
        pass
    compile_something()
    assert not (tmp_path / "called").exists()


def test_one_processor_compiles_alone(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with compiled_apart([module]):
        compile_something()
    assert not (tmp_path / "called").exists()


def test_nobody_is_started_to_compile_what_cannot_be_kept(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "_not_kept", ["kernel"])
    with compiled_apart([module]):
        compile_something()
    assert not (tmp_path / "called").exists()


def test_a_process_that_fails_is_nothing_to_worry_about(module: str, tmp_path: Path) -> None:
    (tmp_path / "then.py").write_text("def do(): raise SystemExit(1)\n")
    with compiled_apart([module]):
        compile_something()
    assert caller(tmp_path)


def test_where_no_process_can_be_started_all_is_compiled_here(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with compiled_apart([module]):
        compile_something()
    assert not (tmp_path / "called").exists()


def test_a_signal_meanwhile_ends_the_other_process(module: str, tmp_path: Path) -> None:
    (tmp_path / "then.py").write_text("import signal\ndef do(): signal.pause()\n")
    with pytest.raises(SystemExit), compiled_apart([module]):
        be_ended_meanwhile(tmp_path / "called")
    with pytest.raises(ProcessLookupError):
        os.kill(caller(tmp_path), 0)
