"""The whole of it: a simulated fleet, a router per mode, a trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from router.ab.cli import main

pytestmark = pytest.mark.slow

SMALL = ["--sim-workers", "3", "--cache-tokens", "65536", "--speedup", "40", "--limit", "40", "--max-output", "16"]


def test_every_mode_answers_every_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "ab.json", tmp_path / "ab.html"
    assert main([*SMALL, "--modes", "kv,round-robin,none", "--out", str(out), "--html", str(page)]) == 0
    kv, even, direct = json.loads(out.read_bytes())["modes"]
    for mode in (kv, even, direct):
        assert mode["summary"]["requests"] == 40
        assert [row["error"] for row in mode["requests"]] == [""] * 40
    used = [len({row["worker"] for row in mode["requests"]}) for mode in (kv, even, direct)]
    assert used[0] > 1  # all begin alike, and the fleet is idle enough for two that have that to take them all
    assert used[1:] == [3, 3]
    # What was sent is what was counted, and a fresh fleet per mode saw it for the first time.
    assert [row["prompt_tokens"] for row in kv["requests"]] == [row["prompt_tokens"] for row in direct["requests"]]
    assert {mode["requests"][0]["cached_tokens"] for mode in (kv, even, direct)} == {0}
    assert kv["summary"]["hit_ratio"] > even["summary"]["hit_ratio"]
    assert even["summary"]["imbalance_requests"] == pytest.approx(1.0, abs=0.06)
    assert "TTFT s mean" in capsys.readouterr().out
    assert page.read_text("utf-8").count("<svg") == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_child(number: signal.Signals) -> None:
    """Interrupted in the middle of a mode: nobody is left, and there is no traceback."""
    command = [sys.executable, "-m", "router", "ab", *SMALL, "--modes", "kv", "--rate", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("kv: ")  # requests are being answered
        children = _children(process.pid)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "kv-router ab: interrupted; what it had started was ended\n"
    assert len(children) == 2
    assert not [pid for pid in children if _alive(pid)]


def _children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return [int(line) for line in found.stdout.split()]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
