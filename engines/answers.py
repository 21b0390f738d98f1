"""Reading engines' JSON answers without trusting them: whatever is not what it should be reads as absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from indexer.events import LARGEST_COUNT

_T = TypeVar("_T")

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no JSON or msgpack, not of the shape wanted, or nested too deeply."""

ENGINE_DIED = "EngineCore encountered an issue"
"""How the error event begins with which vLLM ends the streams of an engine process that died. Up to 0.12 at least its
code is 400, as if the request were wrong (entrypoints/openai/serving_engine.py); in 0.22 it is 500."""


def read_json(answer: tuple[int, bytes]) -> object:
    """The value of a 200 answer with a JSON body, else None."""
    status, body = answer
    return parse(body) if status == 200 else None


def parse(text: str | bytes) -> object:
    """A JSON value, or None for what is none."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


def decoded(decode: Callable[[bytes], _T], data: bytes | msgspec.Raw) -> _T:
    """`data` by a decoder of msgspec's. Raises ValueError for whatever cannot be decoded."""
    try:
        return decode(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def whole(value: object, least: int = 0) -> int | None:
    """An integer from `least` to LARGEST_COUNT."""
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_COUNT else None


def share(value: object) -> float | None:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return None
    return float(value)
