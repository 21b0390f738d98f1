"""Keys of SGLang's HiCache in Mooncake Store, as SGLang 0.5.23 writes them (mem_cache/storage/mooncake_store).

    [TAG_]MODEL_DIGEST_{tp}[_{pp}]_k and …_v; of MLA's latent, which all ranks share, MODEL_DIGEST_[{pp}]_k alone

Before 0.5.17 without MODEL_.
A page's digest is the SHA-256 of the digest before it and its tokens, 4 bytes little-endian each. Adapters and salts
begin their chains with a seed, which is not the one of SGLang's events.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from functools import cached_property

import msgspec
import numpy as np

from engines.store.keys import Digest, why_unaskable
from engines.versions import Version, is_before
from indexer.hashing import Tokens
from indexer.types import Namespace

_SEED = b"sglang-cache-namespace-v1"
_NAMES_MODEL: Version = (0, 5, 17)


class SglangLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    model: str
    """The served name."""
    names_model: bool = True
    block_size: int
    """--page-size."""
    tp: int = 1
    """Attention's tensor-parallel size, or `tp_lcm_size` where the heads are split to fit several."""
    pp: int = 1
    mla: bool = False
    tag: str | None = None
    """`extra_backend_tag`; "" is one too."""
    loras: Mapping[str, str] = {}
    """Paths by adapter, of those that --lora-paths gave: one that was loaded later has a random name in the keys."""

    @cached_property
    def problem(self) -> str | None:
        """As `VllmLayout.problem`; so `hashes` and `keys`."""
        return why_unaskable(self.start)

    def hashes(self, tokens: Tokens, namespace: Namespace, parent: Digest | None = None) -> list[Digest] | None:
        unknown = namespace.lora_name is not None and namespace.lora_name not in self.loras
        if unknown or self.problem:
            return None
        before = parent or self._seed(namespace)
        data = memoryview(np.ascontiguousarray(tokens, "<u4").tobytes())
        page, sha256, digests = self.block_size * 4, hashlib.sha256, []
        for at in range(0, len(data) - page + 1, page):
            before = sha256(before + data[at : at + page]).digest()
            digests.append(before)
        return digests

    def _seed(self, namespace: Namespace) -> Digest:
        name, salt = namespace.lora_name, namespace.cache_salt or None
        if name is None and salt is None:
            return b""
        extra = None if name is None else uuid.uuid5(uuid.NAMESPACE_URL, f"{name}\0{self.loras[name]}").hex
        return hashlib.sha256(_SEED + _part(extra) + _part(salt)).digest()

    def keys(self, digest: Digest) -> tuple[str, ...]:
        start = self.start + digest.hex()
        return tuple([start + end for end in self.ends])

    @cached_property
    def start(self) -> str:
        """What stands before the digest in a block's keys."""
        parts = [] if self.tag is None else [self.tag]
        named = [self.model.replace("/", "-")] if self.names_model else []
        return "_".join([*parts, *named, ""])

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """What follows it."""
        stages = [str(stage) for stage in range(self.pp)] if self.pp > 1 else [""]
        if self.mla:
            return tuple(f"_{stage}_k" for stage in stages)
        ranks = [f"{rank}_{stage}" if stage else str(rank) for rank in range(self.tp) for stage in stages]
        return tuple(f"_{rank}_{part}" for rank in ranks for part in "kv")


def _part(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    data = text.encode("utf-8", "surrogatepass")
    return b"\x01" + len(data).to_bytes(8, "little") + data


def names_model(version: str | None) -> bool:
    """Whether an engine's keys have its model's name."""
    return not is_before(version, _NAMES_MODEL)
