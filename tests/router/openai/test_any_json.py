"""JSON of any form, also where it becomes a million objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import msgspec
import pytest

from router.openai.any_json import decode_any

MANY = b"[" + b"[]," * 100_000 + b"[]]"


@pytest.fixture
def looks() -> Iterator[list[str]]:
    """Of the collector, for garbage."""
    seen: list[str] = []

    def look(phase: str, _: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(look)
    yield seen
    gc.callbacks.remove(look)


def test_nobody_looks_for_garbage_while_a_long_text_is_read(looks: list[str]) -> None:
    assert gc.isenabled()
    looks.clear()
    found = decode_any(MANY)
    assert len(looks) <= 4  # one look before, and one since
    assert len(found) == 100_001
    assert gc.isenabled()


def test_the_collector_goes_on_after_what_is_no_json() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_any(MANY[:-1])
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        assert decode_any(MANY)
        assert not gc.isenabled()
    finally:
        gc.enable()
