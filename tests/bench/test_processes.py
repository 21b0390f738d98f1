"""What the benchmark starts ends with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.places import ROOT
from scripts.bench.processes import CannotStart, Child

HOLD = "exec sleep 1000 >{pipe}"
"""For a shell: keeps its end of a pipe open."""
WAITING = """\
import sys, threading
shell = sys.argv.pop()
from scripts.bench import __main__ as bench
from scripts.bench.processes import Child

def wait(effort, found):
    child = Child("waiting", ["sh", "-c", shell])
    try:
        print("up", flush=True)
        threading.Event().wait()
    finally:
        child.stop()

bench.PROXIES["round-robin"] = wait
sys.exit(bench.run())
"""


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def _ends(fd: int) -> bool:
    """Nobody has its other end open any more."""
    return bool(select.select([fd], [], [], 30)[0]) and os.read(fd, 1) == b""


def test_what_a_process_that_ended_has_left_is_ended(pipe: Path) -> None:
    child = Child("leaving", ["sh", "-c", f"({HOLD.format(pipe=pipe)}) & exit 3"])
    with pytest.raises(CannotStart, match="leaving ended with 3"):
        child.wait_until(lambda: False)
    fd = os.open(pipe, os.O_RDONLY)
    child.stop()
    assert _ends(fd)


def test_settings_of_whoever_measures_do_not_tune_what_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("ROUTER_KV_POLICY", "DYN_ROUTER_TEMPERATURE", "DYN_LOG"):
        monkeypatch.setenv(name, "set outside")
    child = Child("telling", ["env"], {"DYN_LOG": "warn"})
    with pytest.raises(CannotStart, match="ended with 0"):
        child.wait_until(lambda: False)
    told = child.output().splitlines()
    assert [line for line in told if line.startswith(("ROUTER_", "DYN_"))] == ["DYN_LOG=warn"]
    assert f"XDG_CACHE_HOME={tmp_path}" in told


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_was_started(pipe: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", WAITING, "round-robin", HOLD.format(pipe=pipe)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        fd = os.open(pipe, os.O_RDONLY)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    assert _ends(fd)
    assert (process.returncode, out) == (130, "")
    assert error.splitlines()[-1] == "interrupted; what it had started was ended"
