"""Keys of vLLM's MooncakeStoreConnector, as vLLM 0.32 writes them (kv_connector/v1/mooncake/store).

    [prefix@]MODEL[@store_…:…]@tp_rank:T@pcp{C}@dcp{D}@pp_rank:P@group:G@DIGEST

Each tensor-parallel rank writes what it alone holds: ranks that hold the same heads share one rank's number. A block is
found only where all ranks' objects are, of all groups of layers that cache by prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import msgspec

from engines.store.keys import Digest, why_unaskable
from engines.store.messages import PICKLED_BLOCKS, ExtraKeys, HashName, chain, seed_digest
from engines.versions import Version, is_before
from indexer.hashing import Tokens
from indexer.types import Namespace

DEFAULT_SEED = "vllm-none-hash"
"""Where PYTHONHASHSEED is not set."""
_SEEDED: Version = (0, 29, 0)
"""Before, each engine then drew one at random (v1/core/kv_cache_utils.py)."""


class VllmGroup(msgspec.Struct, frozen=True):
    """Layers that cache alike. `holds`: attention heads, spread over the ranks; MLA's latent, the same on each rank;
    or state that is each rank's own, as Mamba's."""

    number: int = 0
    holds: Literal["heads", "latent", "state"] = "heads"


class VllmLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Sliding windows and Mamba need fewer blocks than all: for models with such groups less is found than is there."""

    model: str
    """As vLLM was given it; the keys have the last part of a path."""
    block_size: int
    hash: HashName = "sha256"
    hash_seed: str | None = DEFAULT_SEED
    """None: drawn by each engine."""
    tp: int = 1
    """The store's own, where the keys have `@store_tp:`."""
    pp: int = 1
    kv_heads: int | None = None
    """Of the whole model; None: at least one for each rank."""
    groups: tuple[VllmGroup, ...] = (VllmGroup(),)
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
        if self.hash == "sha256" and self.block_size not in PICKLED_BLOCKS:
            return f"how vLLM hashes blocks of {self.block_size} tokens is not known here"
        return why_unaskable(self._starts[0])

    def hashes(self, tokens: Tokens, namespace: Namespace, parent: Digest | None = None) -> list[Digest] | None:
        """The digests of all full blocks of `tokens`, which follow the block `parent`, or begin the prompt. None: there
        is a problem, or the names of this namespace cannot be known."""
        lora = self._lora(namespace)
        if lora is None or self.problem:
            return None
        salted: ExtraKeys = (("cache_salt", namespace.cache_salt),) if namespace.cache_salt else ()
        first = lora if parent else lora + salted
        return chain(self.hash, tokens, self.block_size, parent or self._root, first, lora)

    def _lora(self, namespace: Namespace) -> ExtraKeys | None:
        if namespace.lora_name is None:
            return ()
        path = self.loras.get(namespace.lora_name)
        return None if path is None else (("lora", namespace.lora_name, path),)

    def keys(self, digest: Digest) -> tuple[str, ...]:
        """Every object without which the block does not count."""
        name, before = digest.hex(), self._starts
        if len(before) == 1:  # one rank, as most are, and a long prompt has hundreds of blocks
            return (before[0] + name,)
        return tuple([start + name for start in before])

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

    @cached_property
    def _root(self) -> Digest:
        return seed_digest(self.hash, self.hash_seed or "")

    @cached_property
    def _starts(self) -> tuple[str, ...]:
        before = f"{self.prefix}@" if self.prefix else ""
        return tuple(
            f"{before}{self.name}{self.namespace}@tp_rank:{tp}@pcp0@dcp0@pp_rank:{pp}@group:{group.number}@"
            for group in self.groups
            for tp in range(self.ranks(group))
            for pp in range(self.pp)
        )


def seed_of(version: str | None) -> str | None:
    """Of an engine without PYTHONHASHSEED; None where each has its own."""
    return None if is_before(version, _SEEDED) else DEFAULT_SEED
