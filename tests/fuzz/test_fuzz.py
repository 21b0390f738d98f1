"""Every target for less than a second, with the same inputs each time; and the fuzzer itself, which must find what is
wrong."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from tests.examples import examples
from tests.fuzz.__main__ import main
from tests.fuzz.engine import fuzz, minimise
from tests.fuzz.target import Target, pieces
from tests.fuzz.targets import ALL

EXECUTIONS = examples(30)
"""By a target's share; the seeds at least."""


@pytest.mark.parametrize("target", ALL.values(), ids=ALL.keys())
def test_nothing_fails(target: Target) -> None:
    seeds = len(target.seeds())
    result = fuzz(target, "tests", max(seeds, EXECUTIONS * target.share))
    assert result.failure is None, result.failure.report
    assert result.kept >= seeds


def test_the_page_names_every_target_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "long-tests.md").read_text("utf-8")
    rows = page.partition("| target | what must hold |")[2].partition("\n\n")[0].splitlines()[2:]
    assert {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])} == set(ALL)


def fails_at_a_word(data: bytes) -> int:
    if b"ab" in data:
        raise KeyError("found")
    return data.count(b"a")


def test_a_fault_is_found_made_small_and_comes_again() -> None:
    target = Target("word", fails_at_a_word, lambda: [b"xxxxxxxx" * 20], (b"a", b"b"))
    found = fuzz(target, "1", 100_000)
    assert found.failure is not None
    assert found.failure.smallest == b"ab"
    assert b"ab" in found.failure.data
    assert "KeyError" in found.failure.where
    again = fuzz(target, "1", found.executions)
    assert again.failure is not None
    assert again.failure.data == found.failure.data
    assert fuzz(target, "1", found.executions - 1).failure is None


def test_another_fault_is_not_taken_for_the_same_when_an_input_is_made_small() -> None:
    def run(data: bytes) -> None:
        if len(data) < 5:
            raise ValueError("short")
        raise KeyError("long")

    found = fuzz(Target("two", run, lambda: [b"x" * 50]), "1", 10)
    assert found.failure is not None
    assert len(found.failure.smallest) == 5


def test_what_does_not_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.engine.HANG", 0.01)

    def run(data: bytes) -> None:
        while data:
            pass

    found = fuzz(Target("hang", run, lambda: [b""], (b"x",)), "1", 1000)
    assert found.failure is not None
    assert found.failure.where.startswith("Hang")


def test_new_outcomes_are_kept_and_lead_further() -> None:
    """Eight right bytes in a row are not found by chance."""

    def run(data: bytes) -> int:
        right = next(length for length in range(8, -1, -1) if data.startswith(bytes(range(1, length + 1))))
        assert right < 8
        return right

    found = fuzz(Target("stairs", run, lambda: [bytes(8)], tuple(bytes([n]) for n in range(1, 9))), "1", 200_000)
    assert found.failure is not None


def test_the_same_data_is_always_cut_alike() -> None:
    for size in range(200):
        assert b"".join(pieces(bytes(size))) == bytes(size)
        assert pieces(bytes(size)) == pieces(bytes(size))


def test_minimising_keeps_what_counts() -> None:
    assert minimise(b"..a....b...c..", lambda data: all(sign in data for sign in b"abc")) == b"abc"


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    arguments = ["--target", "token-ids", "--target", "chunks", "--executions", "400", "--jobs", "1", "--seed", "x"]
    assert main(arguments) == 0
    said = capfd.readouterr().out
    assert "in all 400 executions" in said
    monkeypatch.setitem(ALL, "chunks", ALL["chunks"]._replace(run=fails_at_a_word, words=(b"ab",)))
    assert main(arguments) == 1
    said = capfd.readouterr().out
    file = re.search(r"--target chunks --input (\S+)", said)
    assert file
    assert Path(file[1]).read_bytes() == b"ab"
    with pytest.raises(KeyError):
        main(["--target", "chunks", "--input", file[1]])
    assert resource.getrlimit(resource.RLIMIT_AS) == limits, "what runs after it starts with its own limits"
