"""What stands for a prompt whose tokens cannot be known beforehand: its texts, four bytes for a token.

Engines render such a request in ways of their own, or see images in it. But what begins alike is rendered alike, so a
worker that was sent a request lately probably holds what another begins with (docs/adr/0009-prompts-without-tokens.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec
import numpy as np
import xxhash

from indexer.hashing import Tokens
from router.tokens.conversation import BILLING_HEADER

BYTES_PER_TOKEN: Final = 4
"""Of English text, roughly; and an array of tokens has as many for each."""
MEDIA_TOKENS: Final = 1024
"""That an image, a sound or a file counts: vision models make 250 (a thumbnail) to some thousands of one."""
MOST_MEDIA: Final = 256
"""Of a request that count so. What is some bytes to a client is 4 KiB here; those beyond are told apart, no more."""
MOST_VALUES: Final = 2**17
"""Of a request that are looked at: nobody else is served meanwhile, and an empty object is three bytes to a client."""
_DIGESTS: Final = MEDIA_TOKENS * BYTES_PER_TOKEN // xxhash.xxh3_64().digest_size
_MEDIA: Final = re.compile("image|audio|video|file|document|embeds")
"""Parts of the types of messages' parts. Of embeddings each token is kilobytes to a client."""
_TOOLS: Final = frozenset(("file_search", "image_generation"))
"""Types of OpenAI's own tools, which Codex and others offer: no medium is in them."""
_NOT_RENDERED: Final = frozenset(("type", "id", "status", "cache_control", "signature"))
"""Clients move Anthropic's `cache_control` from message to message, and need not send ids again. The signature of its
thinking may be as long as that."""


def stand_ins(values: Sequence[object], *, billed: bool = False) -> Tokens:
    """Of JSON values, or arrays of token ids, in the order in which they are rendered: of the strings in them, wherever
    they stand, since a text may be a string or a list of parts. What stands behind `MOST_VALUES` is passed over.
    `billed`: the model gets to see billing headers."""
    pieces: list[bytes] = []
    media, room = 0, MOST_VALUES
    left = list(reversed(values))
    while left:
        value = left.pop()
        if isinstance(value, str):
            seen = value if billed or not value.startswith(BILLING_HEADER) else value.partition("\n")[2]
            pieces.append(seen.encode("utf-8", "surrogatepass"))
        elif isinstance(value, np.ndarray):
            pieces.append(value.tobytes())
        elif isinstance(value, list):
            left.extend(reversed(value[:room]))
            room = max(0, room - len(value))
        elif isinstance(value, dict) and _is_media(value):
            digest = _digest(value)
            pieces.append(digest * _DIGESTS if media < MOST_MEDIA else digest)
            media += 1
        elif isinstance(value, dict):
            left.extend(reversed(_shown(value, room)))
            room = max(0, room - len(value))
    text = bytearray().join(pieces)  # can be written to, as arrays of tokens can: hashing is compiled for these
    return np.frombuffer(text, np.uint32, len(text) // BYTES_PER_TOKEN)


def _shown(part: dict[str, object], room: int) -> list[object]:
    """What the model sees of it. The input of Anthropic's calls of tools becomes JSON, whatever is in it."""
    if part.get("type") == "tool_use" and "input" in part:
        part = {**part, "input": _as_json(part["input"]).decode()}
    return [each for name, each in islice(part.items(), room) if name not in _NOT_RENDERED]


def _as_json(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except RecursionError:  # it was read where fewer calls were under way; no engine knows what that is, either
        return b""


def _digest(part: dict[str, object]) -> bytes:
    """Of what the model sees of it: vLLM takes its `uuid`, if it has one, in place of all else."""
    shown = part.get("uuid") or {name: value for name, value in part.items() if name not in _NOT_RENDERED}
    return xxhash.xxh3_64_digest(_as_json(shown))


def _is_media(part: dict[str, object]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and _MEDIA.search(kind) is not None and kind not in _TOOLS
