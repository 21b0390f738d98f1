"""What every layout of keys can tell: which objects in the store make up a block of a prompt.

A block's *digest* is the engine's own cryptographic hash, chained from the start of the prompt. It names the block's
objects for good: a caller may keep digests by whatever names its blocks, and go on with a chain from any of them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from indexer.hashing import Tokens
from indexer.types import Namespace

Digest: TypeAlias = bytes
"""Of one block; for an engine that hashes finer than it stores, of each part of the block, one after the other."""

DIGEST_BYTES = 32


class StoreKeys(Protocol):
    """The names under which one model's engines keep their blocks."""

    @property
    def block_size(self) -> int:
        """Tokens of a block: what is found in the store is a multiple of it."""

    @property
    def problem(self) -> str | None:
        """Why the names cannot be known, for people; None when they can."""

    def hashes(self, tokens: Tokens, namespace: Namespace, parent: Digest | None = None) -> list[Digest] | None:
        """Of all full blocks of `tokens`, which follow `parent`, or begin the prompt. None: there is a
        problem, or the names of this namespace cannot be known."""

    def keys(self, digest: Digest) -> tuple[str, ...]:
        """Every object without which the block does not count."""


class Verdict(NamedTuple):
    """`agrees` None: there is nothing to tell it by."""

    agrees: bool | None
    why: str
    """A sentence for people."""
