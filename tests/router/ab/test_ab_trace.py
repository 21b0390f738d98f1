from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.ab.errors import RunError
from router.ab.prompts import END_TOKEN, FIRST_TOKEN, completion_body, prompt_text
from router.ab.trace import BLOCK_TOKENS, SHAPES, Row, read, reuse, stretch, synthesize, without_reuse

ROW = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}


def tokens(row: Row, seed: int = 0) -> list[int]:
    found = json.loads(b"[" + prompt_text(row, seed) + b"]")
    assert isinstance(found, list)
    return found


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


def test_a_trace_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot read the trace"):
        read(tmp_path / "none")
    with pytest.raises(RunError, match="has no rows"):
        read(write(tmp_path / "empty", ""))


def test_stretch() -> None:
    rows = [Row(at * 1000, 10, at + 1, (0,)) for at in range(10)]
    assert stretch(rows) == rows
    assert [row.timestamp for row in stretch(rows, duration=3)] == [0, 1000, 2000]
    assert len(stretch(rows, duration=5, limit=2)) == 2
    assert [row.output_length for row in stretch(rows, limit=4, max_output=2)] == [1, 2, 2, 2]


def test_reuse_counts_tokens() -> None:
    rows = [Row(0, 1024, 1, (0, 1)), Row(1, 612, 1, (0, 2))]
    assert reuse(rows) == 512 / 1636
    assert reuse([]) == 0.0


@given(seed=st.integers(0, 5), length=st.integers(1, 2000), first=st.integers(0, 2**40))
def test_prompts_have_their_length_and_range(seed: int, length: int, first: int) -> None:
    row = Row(0, length, 1, tuple(range(first, first - -length // BLOCK_TOKENS)))
    found = tokens(row, seed)
    assert len(found) == length
    assert min(found) >= FIRST_TOKEN
    assert max(found) < END_TOKEN
    assert found == tokens(row, seed)


def test_ids_decide_the_content() -> None:
    one, two = tokens(Row(0, 1536, 1, (0, 1, 2))), tokens(Row(0, 1536, 1, (0, 1, 3)))
    assert one[:1024] == two[:1024]
    assert one[1024:] != two[1024:]
    assert tokens(Row(0, 512, 1, (0,)), seed=1) != one[:512]


def test_content_stays_the_same_between_versions() -> None:
    assert tokens(Row(0, 4, 1, (7,))) == [24255, 25954, 12822, 12517]


def test_the_body_of_a_request() -> None:
    body = json.loads(completion_body(Row(0, 700, 9, (0, 1)), 'a "model"', 0))
    assert len(body.pop("prompt")) == 700
    assert body == {
        "model": 'a "model"',
        "max_tokens": 9,
        "min_tokens": 9,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_synthetic_traces_are_valid_and_repeatable(tmp_path: Path, kind: str, seed: int) -> None:
    rows = synthesize(kind, seed, duration=120)
    text = (json.dumps({key: getattr(row, key) for key in ROW}) for row in rows)
    began = rows[0].timestamp
    read_back = [structs.replace(row, timestamp=row.timestamp + began) for row in read(write(tmp_path / "t", *text))]
    assert read_back == rows
    assert rows == synthesize(kind, seed, duration=120)
    assert rows != synthesize(kind, seed + 1, duration=120)


@pytest.mark.parametrize("kind", SHAPES)
def test_synthetic_conversations_share_a_system_prompt_and_grow(kind: str) -> None:
    rows = synthesize(kind, 0)
    system = SHAPES[kind].system // BLOCK_TOKENS
    assert len({row.hash_ids[:system] for row in rows}) == 1
    assert 0.5 < reuse(rows) < 0.95
    parents: dict[int, int] = {}
    for row in rows:
        for parent, block in zip(row.hash_ids, row.hash_ids[1:], strict=False):
            assert parents.setdefault(block, parent) == parent  # an id's prefix is always the same


def test_an_unknown_kind() -> None:
    with pytest.raises(RunError, match="no synthetic trace is called 'x'; there are: conversation, agent"):
        synthesize("x", 0)


def test_without_reuse_nothing_is_in_common() -> None:
    rows = synthesize("agent", 0)
    control = without_reuse(rows)
    assert reuse(rows) > 0.5
    assert reuse(control) == 0
    assert [(row.timestamp, row.input_length, len(row.hash_ids)) for row in control] == [
        (row.timestamp, row.input_length, len(row.hash_ids)) for row in rows
    ]
