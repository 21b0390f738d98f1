"""The table is made of what the parts really write, and their flags are theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tests.chaos.__main__
import tests.fuzz.__main__
import tests.load.__main__
import tests.soak.__main__
from tests.chaos.ledger import Ledger
from tests.chaos.report import write
from tests.load.capacity import Held
from tests.load.idle_streams import Streams
from tests.nightly.__main__ import Done, page
from tests.nightly.parts import parts
from tests.soak.report import plain
from tests.soak.run import Outcome, Settings
from tests.soak.verdict import Finding, Limits

PARTS = {part.name: part for part in parts(7)}


def read(name: str, told: object) -> dict[str, str]:
    return PARTS[name].read(json.loads(json.dumps(told)))


def test_flags_are_known_to_the_parts() -> None:
    for module, name in (
        (tests.soak.__main__, "soak"),
        (tests.chaos.__main__, "chaos"),
        (tests.load.__main__, "load"),
        (tests.fuzz.__main__, "fuzz"),
    ):
        part = PARTS[name]
        assert part.arguments[0] == module.__name__.removesuffix(".__main__")
        module.make_parser().parse_args([*part.arguments[1:], part.file, "x"])


@pytest.mark.slow
def test_fuzz(tmp_path: Path) -> None:
    file = tmp_path / "fuzz.json"
    arguments = ["--target", "token-ids", "--executions", "20", "--jobs", "1", PARTS["fuzz"].file, str(file)]
    subprocess.run([sys.executable, "-m", "tests.fuzz", *arguments], check=True)
    assert read("fuzz", json.loads(file.read_bytes())) == {"inputs fuzzed": "20", "failures among them": "0"}


def test_soak() -> None:
    settings = Settings(30, None, 3, 10, 1, Limits())
    findings = [Finding("growth of memory", "+1.0%", "≤ 5%", good=True)] * 9
    outcome = Outcome(settings, 40.0, [], {"answered": 900, "left": 100}, 5, 2, findings, 0, [])
    figures = read("soak", plain(outcome))
    assert figures["soak, requests"] == "1,000, 900 answered in full"
    assert figures["soak, growth of memory"] == "+1.0% (limit ≤ 5%)"


def test_chaos(tmp_path: Path) -> None:
    ledgers = [Ledger("answers"), Ledger("virtual")]
    for ledger in ledgers:
        ledger.fault("kill", "w0", 3)
    ledgers[0].lost = 1
    write(tmp_path / "chaos.json", 1, 2.0, ledgers)
    figures = read("chaos", json.loads((tmp_path / "chaos.json").read_bytes()))
    assert figures == {"chaos, faults": "3", "chaos, requests": "1", "chaos, lost": "1", "chaos, violations": "0"}


def test_load() -> None:
    row = tests.load.__main__.Row("ours", Held(1000.0, 0.01, 5), Streams(9000, 9000, 9000, 12.0), "")
    absent = tests.load.__main__.Row("sglang-router", None, None, "cannot be installed")
    figures = read("load", [tests.load.__main__.plain(each) for each in (row, absent)])
    assert figures == {
        "load, ours, requests a second held": "1,000",
        "load, ours, idle streams": "9,000 of 9,000 whole, 12.0 KiB each",
    }


@pytest.mark.parametrize(("status", "verdict"), [(0, "passed"), (1, "**failed**")])
def test_a_part_that_failed_says_so(status: int, verdict: str) -> None:
    assert f"| fuzz | 2 | {verdict} |" in page([Done(PARTS["fuzz"], status, 2.0, {})])
