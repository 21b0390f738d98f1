"""What is drawn can be run, and is the same every time."""

from __future__ import annotations

import sys

import pytest

from scripts.bench.drawn.__main__ import main
from scripts.bench.drawn.drawing import draw


@pytest.mark.parametrize("number", range(20))
def test_a_number_draws_what_fits_its_fleet(number: int) -> None:
    rows, fleet = draw(number, 100)
    assert (rows, fleet) == draw(number, 100)
    assert len(rows) == 100
    assert max(row.input_length + row.output_length for row in rows) < fleet.cache_tokens
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)


@pytest.mark.parametrize("number", range(10))
def test_the_same_traffic_is_served_otherwise(number: int) -> None:
    rows, whole = draw(number, 20)
    in_parts, stored = draw(number, 20, "parts"), draw(number, 20, "store")
    assert in_parts[0] == stored[0] == rows
    assert 0 < in_parts[1].prefill < in_parts[1].workers == in_parts[1].prefill + in_parts[1].decode
    assert stored[1].store_tokens >= whole.workers * whole.cache_tokens
    assert (whole.prefill, whole.store_tokens) == (0, 0)


def test_numbers_differ() -> None:
    drawn = [draw(number, 50) for number in range(20)]
    assert len({fleet.timing.prefill_tokens_per_s for _, fleet in drawn}) == 20
    assert len({len({row.hash_ids[0] for row in rows}) for rows, _ in drawn}) > 5, "more is shared in some"


@pytest.mark.slow
@pytest.mark.parametrize("serving", ["whole", "parts", "store"])
def test_a_line_for_each_load_and_what_it_comes_to(
    serving: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--cases", "4", "--requests", "30", "--serving", serving])
    main()
    about, *lines, total = capsys.readouterr().out.splitlines()
    assert about.startswith("4: ")
    assert ("for prompts" in about, "a store of" in about) == (serving == "parts", serving == "store")
    assert [line.split(":")[0].strip() for line in lines] == ["at 0.6", "at 0.9", "at 1.1"]
    worst = max(float(line.split(": ")[2].split(";")[0]) for line in lines)
    assert total.endswith(f"{worst:.3f} at most")


@pytest.mark.parametrize("cases", ["x", "3-1", "-1", "1-2-3"])
def test_a_wrong_range_is_refused(cases: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", f"--cases={cases}"])
    with pytest.raises(SystemExit):
        main()
