"""What the layouts of keys have in common, `vllm.VllmLayout` and `sglang.SglangLayout`: each tells which objects in the
store make up a block of a prompt.

A block's *digest* is the engine's own cryptographic hash, chained from the start of the prompt. It names the block's
objects for good: a caller may keep digests by whatever names its blocks, and go on with a chain from any of them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Digest: TypeAlias = bytes
"""Of one block."""

DIGEST_BYTES = 32


class Verdict(NamedTuple):
    """Whether the store's keys are named as expected. `agrees` None: there is no key yet to tell it by."""

    agrees: bool | None
    why: str
    """A sentence for people."""


def why_unaskable(name: str) -> str | None:
    """Why blocks that are named with `name` cannot be asked for, for people; None when they can."""
    return "its name has a comma, which a master takes for the end of a key" if "," in name else None
