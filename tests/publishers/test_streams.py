"""Standard streams that are closed, or lead nowhere."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from publishers.streams import say
from tests.fakes.full_stream import FullStream

ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import os, sys
from publishers.streams import open_standard_streams
open_standard_streams()
print("to nobody")
print("to nobody", file=sys.stderr)
said = [os.readlink(f"/proc/self/fd/{number}") + str(os.get_inheritable(number)) for number in range(3)]
open(sys.argv[1], "w").write(" ".join(said))
"""


@pytest.mark.parametrize(("closed", "opened"), [("<&- >&- 2>&-", {0, 1, 2}), (">&-", {1}), ("2>&-", {2}), ("", set())])
def test_closed_ones_are_opened_for_children_too(tmp_path: Path, closed: str, opened: set[int]) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", LOOK, str(tmp_path / "said")]
    assert subprocess.run(command, cwd=ROOT, stdin=subprocess.PIPE, capture_output=True, check=False).returncode == 0
    said = (tmp_path / "said").read_text().split()
    assert {number for number, where in enumerate(said) if where == "/dev/nullTrue"} == opened
    assert all(where.endswith("True") for where in said)


def test_an_encoding_that_lacks_a_letter_is_no_reason_to_end() -> None:
    lines = "from publishers.streams import open_standard_streams; open_standard_streams(); print('2 \u00d7 3')"
    told = subprocess.run(
        [sys.executable, "-c", lines],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert told.stdout == b"2 ? 3\n"


def test_a_line_is_written_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    say("Listening")
    assert capsys.readouterr().out == "Listening\n"


def test_a_line_that_cannot_be_written_is_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdout", FullStream())
    with caplog.at_level(logging.WARNING):
        say("Listening")
    (record,) = caplog.records
    assert vars(record)["fields"] == {"reason": "No space left on device", "line": "Listening"}
    say("and on it goes")
    assert len(caplog.records) == 1
    sys.stdout.close()
