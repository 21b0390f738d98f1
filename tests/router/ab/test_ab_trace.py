from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.ab.errors import RunError
from router.ab.prompts import END_TOKEN, FIRST_TOKEN, completion_body, prompt_text
from router.ab.trace import BLOCK_TOKENS, SHAPES, Row, reuse, stretch, synthesize, without_reuse
from router.ab.trace_file import read


def tokens(row: Row, seed: int = 0) -> list[int]:
    found = json.loads(b"[" + prompt_text(row, seed) + b"]")
    assert isinstance(found, list)
    return found


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


def test_blocks_may_be_of_another_size() -> None:
    one, two = (tokens(Row(0, 40, 1, ids, block_tokens=16)) for ids in ((0, 1, 2), (0, 1, 3)))
    assert len(one) == len(two) == 40
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]
    assert reuse([Row(0, 40, 1, (0, 1, 2), 16), Row(1, 40, 1, (0, 1, 3), 16)]) == 32 / 80


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
    path, began = tmp_path / "t.jsonl", rows[0].timestamp
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))
    read_back = [structs.replace(row, timestamp=row.timestamp + began) for row in read(path)]
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
