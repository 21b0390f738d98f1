"""Lists of token ids are read as JSON has them; anything else is left to the JSON decoder."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tokens import read_ids

ids = st.lists(st.integers(0, 2**32 - 1), min_size=1)
blanks = st.sampled_from(["", " ", "\n", "\t\r  "])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@given(ids, blanks, blanks)
def test_ids_are_read_whatever_blanks_are_between(expected: list[int], before: str, after: str) -> None:
    text = "[" + ",".join(f"{before}{number}{after}" for number in expected) + "]"
    found = read_ids(text.encode())
    assert found is not None
    assert found.tolist() == expected
    assert found.flags.writeable


def is_list_of_ids(value: Any) -> bool:
    """Written without sign, point or exponent, so that it is an int to Python as well."""
    return (
        isinstance(value, list) and bool(value) and all(type(number) is int and 0 <= number < 2**32 for number in value)
    )


@given(values | st.lists(st.integers(-2, 2**32 + 1) | st.floats(0, 9), max_size=3))
def test_other_values_are_not(value: Any) -> None:
    found = read_ids(json.dumps(value).encode())
    assert (found is not None) == is_list_of_ids(value)


@pytest.mark.parametrize(
    "text", ["", "1", "[]", "[ ]", "[[1]]", "[1, [2]]", "{}", '["1"]', '"[1]"', "[true]", "[null]"]
)
def test_what_is_no_list_of_numbers(text: str) -> None:
    assert read_ids(text.encode()) is None


@pytest.mark.parametrize("text", ["[-1]", "[1.0]", "[1e3]", "[1, 4294967296]", "[99999999999999999999999999]"])
def test_numbers_that_are_no_ids(text: str) -> None:
    assert read_ids(text.encode()) is None
