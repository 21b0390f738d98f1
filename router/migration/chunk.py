"""What an event of a stream says, as far as its record needs it."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias

import msgspec

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
ABSENT = msgspec.Raw()
NULL = msgspec.Raw(b"null")
DATA = b"data: "
_IDS = re.compile(rb'token_ids":\s*(\[[^\]]*\])')
_FIELD = b'token_ids":'
"""How the names of fields with token ids end. No text that a model wrote holds this: quotes are escaped there."""


class Delta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The delta of a chat without tools and reasoning. Any other has further fields, and cannot be decoded."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET


class Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
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
decode_ids = msgspec.json.Decoder(list[TokenId]).decode
decode_error = msgspec.json.Decoder(Error).decode
decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
decode_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
encode = msgspec.json.Encoder().encode


def is_data(event: bytes) -> bool:
    """Whether it holds one JSON object."""
    return event.startswith(b"data: {")


def without_ids(event: bytes) -> bytes:
    """The event as a client expects it that has not asked for token ids: null in place of each list of them."""
    at = event.find(_FIELD)
    while at >= 0:  # `find` comes first: a search for a pattern that begins with a quote stops at each
        found = _IDS.match(event, at)
        if found:
            event = b"%bnull%b" % (event[: found.start(1)], event[found.end(1) :])
        at = event.find(_FIELD, at + len(_FIELD))
    return event


def write_event(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % encode(fields)
