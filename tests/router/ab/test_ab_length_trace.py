from __future__ import annotations

from pathlib import Path

import pytest

from router.ab.errors import RunError
from router.ab.trace import Row, reuse
from router.ab.trace_file import read

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def rows_of(tmp_path: Path, *lines: str) -> list[Row]:
    path = tmp_path / "trace.csv"
    path.write_text("\r\n".join(lines) + "\r\n")
    return read(path)


def test_azures_times_of_day_become_milliseconds(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, AZURE, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:05.2299600,110,27")
    assert [(row.timestamp, row.input_length, row.output_length) for row in rows] == [(0, 4808, 10), (1250, 110, 27)]


def test_times_with_a_zone(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, AZURE, "2024-05-12 00:00:00.500000+00:00,5,6", "2024-05-12 00:00:00+00:00,7,8")
    assert [(row.timestamp, row.input_length) for row in rows] == [(0, 7), (500, 5)]


def test_burstgpts_times_are_seconds_and_requests_that_failed_are_left_out(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        BURST,
        "5,,1.2,ChatGPT,472,18,490,Conversation log",
        "45.5,a7,,GPT-4,1087,0,1087,API log",
        "118,a7,3,GPT-4,417,276,693,API log",
    )
    assert [(row.timestamp, row.input_length, row.output_length) for row in rows] == [(0, 472, 18), (113_000, 417, 276)]


def test_no_two_prompts_share_a_prefix(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, BURST, *(f"{second},,,m,1025,3,1028,API log" for second in range(3)))
    assert [len(row.hash_ids) for row in rows] == [3, 3, 3]
    assert reuse(rows) == 0


@pytest.mark.parametrize("line", ["noon,5,6", "2023-11-16 18:17:03,5", "2023-11-16 18:17:03,5.5,6", "2023-11-16,-5,6"])
def test_a_malformed_row_is_named(tmp_path: Path, line: str) -> None:
    needed = r"trace.csv:3: not a trace row: TIMESTAMP must be a time, ContextTokens and GeneratedTokens whole numbers"
    with pytest.raises(RunError, match=needed):
        rows_of(tmp_path, AZURE, "2023-11-16 18:17:03,5,6", line)


def test_a_time_that_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Timestamp must be a time"):
        rows_of(tmp_path, BURST, "nan,,,m,5,6,11,API log")


@pytest.mark.parametrize("lines", [(), ("2023-11-16 18:17:03,0,6",)])
def test_a_trace_without_requests(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(RunError, match=r"trace.csv has no rows"):
        rows_of(tmp_path, AZURE, *lines)


def test_another_csv_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"trace.csv:1: not a trace row"):
        rows_of(tmp_path, "time,tokens", "1,2")
