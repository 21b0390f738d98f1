"""What a batch asks for beyond its first prompt: estimated by length, without what all of its prompts begin with."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import pack_tokens
from router.tokens import other_tokens

SHOTS = "Some examples that every question is asked with. " * 100


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (["a" * 400], 0),
        (["a" * 400, "b" * 80], 20),
        (["a" * 400, "b" * 80, "c" * 160], 60),
        ([SHOTS + "a" * 80, SHOTS + "b" * 80, SHOTS + "c" * 80], 40),
        (["same"] * 5, 0),
        (["", "b" * 80], 20),
        ([pack_tokens([1, 2, 3, 4]), pack_tokens([1, 2, 9, 9, 9])], 3),
        (["a" * 8, "\ud800" * 8], 6),
        ([None, 5, {}], 0),
        (["a"] + ["b" * 40] * 2047, 20470),
    ],
)
def test_what_a_batch_has_beyond_its_first_prompt(batch: list[object], expected: int) -> None:
    assert other_tokens(batch) == expected


def test_what_each_prompt_begins_with_counts_where_each_is_computed_whole() -> None:
    assert other_tokens([SHOTS + "a" * 80, SHOTS + "b" * 80], uncached=True) == len(SHOTS) // 4 + 20


@given(st.lists(st.binary(max_size=200), min_size=2, max_size=60))
def test_what_is_common_is_what_is_common(texts: list[bytes]) -> None:
    batch = [text.decode("latin-1") for text in texts]
    first, *rest = [text.encode() for text in batch]
    own = sum(len(each) - _alike(first, each) for each in rest)
    assert other_tokens(batch) == own // 4


def _alike(one: bytes, other: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_what_long_prompts_have_in_common_takes_little_more_than_to_read_them() -> None:
    """Everybody else waits meanwhile, and a request may be of 64 MB."""
    one, other = "a" * 2**24, "a" * 2**24 + "b"
    reading = _seconds(lambda: one.encode() == other.encode())
    assert _seconds(lambda: other_tokens([one, other])) < 10 * reading


def _seconds(work: Callable[[], object]) -> float:
    took = []
    for _ in range(5):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def test_a_long_batch_is_taken_to_be_as_its_first_prompts_are() -> None:
    rng = np.random.default_rng(1)
    batch = [pack_tokens(rng.integers(0, 1000, size).tolist()) for size in rng.integers(50, 150, 2000)]
    whole = sum(map(len, batch[1:]))
    assert other_tokens(batch) == pytest.approx(whole, rel=0.1)
