"""Keys of vLLM's MooncakeStoreConnector, as vLLM 0.32 writes them (kv_connector/v1/mooncake/store).

    [prefix@]MODEL[@store_…:…]@tp_rank:T@pcp{C}@dcp{D}@pp_rank:P@group:G@DIGEST

Each tensor-parallel rank writes what it alone holds: ranks that hold the same heads share one rank's number. A block is
found only where all ranks' objects are, of all groups of layers that cache by prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Literal, NewType

import msgspec

from engines.store.keys import DIGEST_BYTES, Digest
from engines.store.messages import PICKLED_BLOCKS, ExtraKeys, HashName, chain, seed_digest
from engines.versions import Version, is_before
from indexer.hashing import Tokens
from indexer.types import Namespace

DEFAULT_SEED = "vllm-none-hash"
"""Where PYTHONHASHSEED is not set."""
_SEEDED: Version = (0, 29, 0)
"""Before, each engine then drew one at random (v1/core/kv_cache_utils.py)."""

HashBlockSize = NewType("HashBlockSize", int)
"""Tokens that vLLM hashes at once."""
GroupBlockSize = NewType("GroupBlockSize", int)
"""Tokens of one group's block, and of its objects: a multiple of what is hashed at once."""
SchedulerBlockSize = NewType("SchedulerBlockSize", int)
"""Tokens that are found or not: a multiple of every group's block. All three are one but for hybrid models."""


class VllmGroup(msgspec.Struct, frozen=True):
    """Layers that cache alike. `holds`: attention heads, spread over the ranks; MLA's latent, the same on each rank;
    or state that is each rank's own, as Mamba's."""

    number: int = 0
    holds: Literal["heads", "latent", "state"] = "heads"
    block_size: GroupBlockSize | None = None
    """None: the scheduler's."""


class VllmLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Sliding windows and Mamba need fewer blocks than all: for models with such groups less is found than is there."""

    model: str
    """As vLLM was given it; the keys have the last part of a path."""
    block_size: SchedulerBlockSize
    hash: HashName = "sha256"
    hash_seed: str | None = DEFAULT_SEED
    """None: drawn by each engine."""
    tp: int = 1
    """The store's own, where the keys have `@store_tp:`."""
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    kv_heads: int | None = None
    """Of the whole model; None: at least one for each rank."""
    groups: tuple[VllmGroup, ...] = (VllmGroup(),)
    hash_block_size: HashBlockSize | None = None
    """None: the scheduler's."""
    prefix: str = ""
    """The connector's `cache_prefix`."""
    namespace: str = ""
    """What stands between the model's name and `@tp_rank:`."""
    loras: Mapping[str, str] = {}
    """Paths by adapter: both are hashed."""

    @cached_property
    def problem(self) -> str | None:
        """Why the keys cannot be known, for people; None when they can."""
        if self.hash_seed is None:
            return "vLLM before 0.29 draws its hashes' seed: give all one PYTHONHASHSEED, and state it as hash_seed"
        if self.dcp > 1:
            return "which keys a block has cannot be known under decode context parallelism (dcp above 1)"
        unit, sizes = self._unit, [self._size(group) for group in self.groups]
        if any(size % unit for size in sizes) or any(self.block_size % size for size in sizes):
            return (
                f"the block sizes do not divide each other: {unit} tokens hashed, {sizes} in the groups of layers, "
                f"{self.block_size} scheduled"
            )
        if self.hash == "sha256" and unit not in PICKLED_BLOCKS:
            return f"how vLLM hashes blocks of {unit} tokens is not known here"
        return None

    def hashes(self, tokens: Tokens, namespace: Namespace, parent: Digest | None = None) -> list[Digest] | None:
        """The digests of all full blocks of `tokens`, which follow the block `parent`, or begin the prompt. None: there
        is a problem, or the names of this namespace cannot be known."""
        lora = self._lora(namespace)
        if lora is None or self.problem:
            return None
        salted: ExtraKeys = (("cache_salt", namespace.cache_salt),) if namespace.cache_salt else ()
        first = lora if parent else lora + salted
        before = parent[-DIGEST_BYTES:] if parent else self._root
        parts = self.block_size // self._unit
        whole = tokens[: len(tokens) // self.block_size * self.block_size]
        digests = chain(self.hash, whole, self._unit, before, first, lora)
        return digests if parts == 1 else [b"".join(digests[at : at + parts]) for at in range(0, len(digests), parts)]

    def _lora(self, namespace: Namespace) -> ExtraKeys | None:
        if namespace.lora_name is None:
            return ()
        path = self.loras.get(namespace.lora_name)
        return None if path is None else (("lora", namespace.lora_name, path),)

    def keys(self, digest: Digest) -> tuple[str, ...]:
        """Every object without which the block does not count."""
        if len(digest) == DIGEST_BYTES:
            name, before = digest.hex(), self._starts
            if len(before) == 1:  # one rank, as most are, and a long prompt has hundreds of blocks
                return (before[0] + name,)
            return tuple([start + name for start in before])
        keys = []
        for starts, size in self._grouped_starts:
            for end in range(size, self.block_size + 1, size):  # a block of the group goes by its last hash
                at = end // self._unit * DIGEST_BYTES
                name = digest[at - DIGEST_BYTES : at].hex()
                keys += [start + name for start in starts]
        return tuple(keys)

    def ranks(self, group: VllmGroup) -> int:
        """How many numbers of tensor-parallel ranks a block of the group has."""
        if group.holds == "latent":
            return 1
        shared = 1 if group.holds == "state" or not self.kv_heads else max(1, self.tp // self.kv_heads)
        return self.tp // shared

    @property
    def name(self) -> str:
        """The model's, in keys."""
        return self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def _unit(self) -> int:
        return self.hash_block_size or self.block_size

    def _size(self, group: VllmGroup) -> int:
        return group.block_size or self.block_size

    @cached_property
    def _root(self) -> Digest:
        return seed_digest(self.hash, self.hash_seed or "")

    @cached_property
    def _starts(self) -> tuple[str, ...]:
        return tuple(start for starts, _ in self._grouped_starts for start in starts)

    @cached_property
    def _grouped_starts(self) -> list[tuple[list[str], int]]:
        return [(self._starts_of(group), self._size(group)) for group in self.groups]

    def _starts_of(self, group: VllmGroup) -> list[str]:
        before = f"{self.prefix}@" if self.prefix else ""
        return [
            f"{before}{self.name}{self.namespace}@tp_rank:{tp}@pcp{pcp}@dcp0@pp_rank:{pp}@group:{group.number}@"
            for pcp in range(self.pcp)
            for tp in range(self.ranks(group))
            for pp in range(self.pp)
        ]


def scheduler_block_size(groups: tuple[VllmGroup, ...]) -> SchedulerBlockSize:
    """Of groups that all tell their own."""
    return SchedulerBlockSize(math.lcm(*(group.block_size for group in groups if group.block_size)))


def seed_of(version: str | None) -> str | None:
    """Of an engine without PYTHONHASHSEED; None where each has its own."""
    return None if is_before(version, _SEEDED) else DEFAULT_SEED
