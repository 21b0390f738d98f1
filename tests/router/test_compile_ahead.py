"""`kv-router compile` leaves nothing for a start to compile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from router import compile_ahead
from tests.e2e.children import PATIENCE, ROOT, Child, Sim, get

_DEBUG = {"NUMBA_DEBUG_CACHE": "1"}
_KERNEL = re.compile(r"^\[cache\] data (?:loaded from|saved to) '(.+)'$", re.MULTILINE)


@pytest.fixture(scope="module")
def ahead() -> set[str]:
    """Files of compiled kernels."""
    ended = subprocess.run(
        [sys.executable, "-m", "router", "compile"],
        cwd=ROOT,
        env={**os.environ, **_DEBUG},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^Compiled in [\d.]+ s\.$", ended.stdout, re.MULTILINE)
    return set(_KERNEL.findall(ended.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_start_needs_no_other_kernel(ahead: set[str], processes: str, tmp_path: Path) -> None:
    told = ""
    with Sim(log=tmp_path) as sim:
        flags = ("--processes", processes, "--port", "0", "--worker", sim.urls[0])
        with Child("router", *flags, log=tmp_path, variables=_DEBUG) as router:
            while not (line := router.first_line()).startswith("Listening on "):
                told += line
            assert get(f"{line.split()[-1]}/metrics")[0] == 200
    needed = set(_KERNEL.findall(told + router.log))
    assert needed
    assert needed <= ahead


@pytest.mark.parametrize("before", [True, False], ids=["full", "no folder"])
def test_where_nothing_can_be_kept_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: bool
) -> None:
    answers, compiled = [before, False], []
    monkeypatch.setattr(compile_ahead, "all_kept", lambda: answers.pop(0))
    monkeypatch.setattr(compile_ahead, "_compile", lambda: compiled.append(True))
    assert compile_ahead.main([]) == 1
    assert bool(compiled) == before  # not in vain
    assert "NUMBA_CACHE_DIR" in capsys.readouterr().err
