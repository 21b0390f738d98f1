"""What an event of a stream says, as far as its record needs it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

ABSENT = msgspec.Raw()
DATA = b"data: "
_IDS = re.compile(rb'"((?:prompt_)?token_ids)":\s*\[[^\]]*\]')
"""Only a field: inside a string these quotes are escaped."""


class Delta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Of a chat without tools and reasoning."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET


class Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = ABSENT


class Chunk(msgspec.Struct, gc=False):
    choices: list[Choice] = []
    prompt_token_ids: msgspec.Raw = ABSENT
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    object: str = ""


class Error(msgspec.Struct, gc=False):
    message: str = ""
    code: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
decode_error = msgspec.json.Decoder(Error).decode
decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
decode_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
encode = msgspec.json.Encoder().encode


def is_data(event: bytes) -> bool:
    """Whether it holds one JSON object."""
    return event.startswith(b"data: {")


def without_ids(event: bytes) -> bytes:
    """As the engine would have said it without being asked for tokens."""
    return _IDS.sub(rb'"\1":null', event)


def write_event(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % encode(fields)
