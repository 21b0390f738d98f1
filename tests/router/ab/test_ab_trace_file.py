from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.ab.errors import RunError
from router.ab.trace import stretch
from router.ab.trace_file import BLOCK_SIZES, read

ROW = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
QWEN = {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 1, "output_length": 132}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_rows_come_in_order_of_arrival(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "t.jsonl", {**ROW, "timestamp": 9}, "", ROW))
    assert [row.timestamp for row in rows] == [0, 9]


def test_a_trace_begins_with_its_first_request(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "t.jsonl", *({**ROW, "timestamp": 1.7e12 + at * 1000} for at in (7, 0, 2))))
    assert [row.timestamp for row in rows] == [0, 2000, 7000]
    assert len(stretch(rows, duration=3)) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "t.jsonl:2: not a trace row"),
        ({**ROW, "hash_ids": ["a", "b"]}, "t.jsonl:2: not a trace row: Expected `int`, got `str`"),
        ({"timestamp": 0}, "missing required field `input_length`"),
        ({**ROW, "hash_ids": [0]}, "1 hash_ids, but one for every 512 of 700 input tokens makes 2"),
        ({**ROW, "output_length": 0}, "must be at least 1"),
        ({**ROW, "timestamp": -1}, "must be at least 1, timestamp at least 0"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(RunError) as caught:
        read(write(tmp_path / "t.jsonl", ROW, row))
    assert message in str(caught.value)


@pytest.mark.parametrize("field", [b'"chat_id": "\xff"', b'"deep": ' + b"[" * 100_000])
def test_a_row_that_cannot_be_decoded_is_named(tmp_path: Path, field: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(ROW).encode()[:-1] + b", %b}" % field)
    with pytest.raises(RunError, match=r"t.jsonl:1: not a trace row"):
        read(path)


@pytest.mark.parametrize(
    "lines", [json.dumps(ROW), "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,700,5"]
)
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "trace"
    path.write_text(lines, encoding="utf-8-sig")
    assert [(row.input_length, row.output_length) for row in read(path)] == [(700, 5)]


def test_a_trace_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot read the trace"):
        read(tmp_path / "none")
    with pytest.raises(RunError, match="has no rows"):
        read(write(tmp_path / "empty", ""))


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_tokens_of_an_id_are_found_out(tmp_path: Path, size: int) -> None:
    long = {**ROW, "input_length": 9 * size - 1, "hash_ids": list(range(9))}
    rows = read(write(tmp_path / "t.jsonl", {**ROW, "input_length": 1, "hash_ids": [7]}, long))
    assert [row.block_tokens for row in rows] == [size, size]


def test_a_row_whose_ids_do_not_fit_the_size_of_the_others(tmp_path: Path) -> None:
    long = {**ROW, "input_length": 64, "hash_ids": [0, 1, 2, 3]}
    with pytest.raises(RunError, match=r"t.jsonl:2: 2 hash_ids, but one for every 16 of 700 input tokens makes 44"):
        read(write(tmp_path / "t.jsonl", long, ROW))


def test_qwens_timestamps_are_seconds(tmp_path: Path) -> None:
    rows = [{**QWEN, "timestamp": at, "input_length": 20, "hash_ids": [7, 9]} for at in (61.5, 60)]
    assert [row.timestamp for row in read(write(tmp_path / "t.jsonl", *rows))] == [0, 1500]


def test_ids_of_content_alone_become_ids_of_prefixes(tmp_path: Path) -> None:
    prompts = [(1, 2, 3), (4, 2, 3), (1, 2, 5), (2,)]
    rows = [{**QWEN, "timestamp": 0, "input_length": 16 * len(ids), "hash_ids": ids} for ids in prompts]
    first, second, third, last = (row.hash_ids for row in read(write(tmp_path / "t.jsonl", *rows)))
    assert first[:2] == third[:2]
    assert len({*first, *second, third[2], *last}) == 8


def test_ids_of_prefixes_stay_as_they_are(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "t.jsonl", ROW, {**ROW, "input_length": 1200, "hash_ids": [0, 5, 9]}))
    assert [row.hash_ids for row in rows] == [(0, 1), (0, 5, 9)]
