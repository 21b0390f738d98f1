"""store_names.py vllm|sglang: prints the names that an engine's own code gives to blocks in Mooncake Store.

A JSON object a line, for layouts that this machine cannot run: several tensor-parallel ranks, MLA, adapters. Each case
has what it was made of, the chain of digests and every key that some rank would write for the last block. Tests hold
our names against them. Run with the Python of the engine's environment."""

# mypy: disable-error-code="import-not-found,import-untyped,unused-ignore"
from __future__ import annotations

import json
import os
import sys
import types
import uuid
from array import array
from collections.abc import Iterator
from typing import Any

TOKENS = [0, 1, 23, 24, 255, 256, 65535, 65536, 151642, *range(1000, 1031)]
LONG = [number * 7919 % 152000 for number in range(512)]
BLOCK = 16
SALT, LORA, LORA_PATH = "tenant é", "adapter", "/models/adapter"


def main() -> None:
    for case in {"vllm": of_vllm, "sglang": of_sglang}[sys.argv[1]]():
        print(json.dumps(case))


def of_vllm() -> Iterator[dict[str, Any]]:
    for name in ("sha256", "sha256_cbor"):
        for seed in (None, "0"):
            for lora, salt in ((None, None), (None, SALT), (LORA, None), (LORA, SALT)):
                digests = vllm_digests(name, seed, TOKENS, BLOCK, lora, salt)
                given = {"hash": name, "hash_seed": seed, "tokens": TOKENS, "block_size": BLOCK}
                yield given | {"lora": lora, "salt": salt, "digests": digests}
        yield {"hash": name, "tokens": LONG, "block_size": 256, "digests": vllm_digests(name, None, LONG, 256)}
    digests = vllm_digests("sha256", None, TOKENS, BLOCK)
    for tp, pp, kv_heads, holds in (
        (1, 1, 8, "heads"),
        (2, 1, 8, "heads"),
        (8, 2, 2, "heads"),
        (4, 1, 1, "heads"),
        (6, 1, 4, "heads"),
        (4, 2, 1, "latent"),
        (2, 1, 8, "state"),
    ):
        written, asked = vllm_keys(digests[-1], tp, pp, kv_heads, [holds])
        given = {"model": "/models/org/Name-7B/", "block_size": BLOCK, "tokens": TOKENS, "tp": tp, "pp": pp}
        yield given | {"kv_heads": kv_heads, "holds": [holds], "keys": written, "asked": asked}
    written, asked = vllm_keys(digests[-1], 2, 1, 1, ["heads", "state"], prefix="team")
    given = {"model": "/models/org/Name-7B/", "block_size": BLOCK, "tokens": TOKENS, "tp": 2, "prefix": "team"}
    yield given | {"kv_heads": 1, "holds": ["heads", "state"], "keys": written, "asked": asked}


def vllm_digests(
    name: str, seed: str | None, tokens: list[int], block: int, lora: str | None = None, salt: str | None = None
) -> list[str]:
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415 - one engine's environment has not the other's
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415

    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    hash_function = get_hash_fn_by_name(name)
    kv_cache_utils.init_none_hash(hash_function)
    adapter = None if lora is None else types.SimpleNamespace(lora_name=lora, lora_path=LORA_PATH)
    request = types.SimpleNamespace(lora_request=adapter, cache_salt=salt, mm_features=[], prompt_embeds=None)
    parent, digests = None, []
    for at in range(0, len(tokens) - block + 1, block):
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, at, at + block, 0)
        parent = kv_cache_utils.hash_block_tokens(hash_function, parent, tokens[at : at + block], extra)
        digests.append(parent.hex())
    return digests


def vllm_keys(
    digest: str, tp: int, pp: int, kv_heads: int, holds: list[str], prefix: str = ""
) -> tuple[list[str], list[str]]:
    """What all ranks write for one block, and what rank 0 asks for."""
    import torch  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import KeyMetadata  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec  # noqa: PLC0415

    attention = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    specs = {
        "heads": lambda: FullAttentionSpec(**attention),
        "latent": lambda: MLAAttentionSpec(**attention),
        "state": lambda: MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.bfloat16,)),
    }
    groups = [types.SimpleNamespace(kv_cache_spec=specs[kind]()) for kind in holds]
    written: dict[str, None] = {}
    for tp_rank in range(tp):
        for pp_rank in range(pp):
            worker = object.__new__(MooncakeStoreWorker)
            vars(worker).update(tp_rank=tp_rank, tp_size=tp, pp_size=pp, pcp_size=1, dcp_size=1, num_kv_head=kv_heads)
            vars(worker).update(_kv_cache_groups=groups, hash_block_size=BLOCK, store_tp_size=None)
            worker._group_tp_replication_factors = worker._compute_group_tp_replication_factors()
            model = "/models/org/Name-7B/".rstrip("/").split("/")[-1]
            metadata = KeyMetadata(model, tp_rank, 0, 0, pp_rank, cache_prefix=prefix)
            worker.token_dbs = worker._build_token_databases(metadata, None)
            written |= {db.key_for(bytes.fromhex(digest)): None for db in worker.token_dbs}
            if (tp_rank, pp_rank) == (0, 0):
                worker._init_lookup_key_prefixes()
                asked = [f"{start}@{digest}" for starts in worker._lookup_key_prefixes for start in starts]
    return sorted(written), asked


def of_sglang() -> Iterator[dict[str, Any]]:
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415
    from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: PLC0415

    digests: list[str] = []
    for lora, salt in ((LORA, None), (None, SALT), (LORA, SALT), (None, None)):
        extra = None if lora is None else uuid.uuid5(uuid.NAMESPACE_URL, f"{lora}\0{LORA_PATH}").hex
        key = RadixKey(array("q", TOKENS[: len(TOKENS) // BLOCK * BLOCK]), extra_key=extra, cache_salt=salt)
        digests = get_storage_hash_str(key, None, page_size=BLOCK)
        yield {"tokens": TOKENS, "block_size": BLOCK, "lora": lora, "salt": salt, "digests": digests}
    for tp, pp, mla, tag in (
        (1, 1, False, None),
        (2, 1, False, "tag"),
        (2, 2, False, None),
        (2, 1, True, None),
        (4, 2, True, "tag"),
    ):
        keys = sglang_keys(digests[-1], tp, pp, tag, mla=mla)
        given = {"model": "org/Name-7B", "block_size": BLOCK, "tokens": TOKENS, "tp": tp, "pp": pp}
        yield given | {"mla": mla, "tag": tag, "keys": keys}


def sglang_keys(digest: str, tp: int, pp: int, tag: str | None, *, mla: bool) -> list[str]:
    """What all ranks write for one page."""
    sys.modules["mooncake"] = types.ModuleType("mooncake")
    sys.modules["mooncake.store"] = types.ModuleType("mooncake.store")
    sys.modules["mooncake.store"].MooncakeDistributedStore = NoStore  # type: ignore[attr-defined]
    import torch  # noqa: PLC0415
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: PLC0415
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore  # noqa: PLC0415

    extra: dict[str, Any] = {"master_server_address": "nowhere:1", "check_server": False}
    if tag is not None:
        extra["extra_backend_tag"] = tag
    parts = 1 if mla else 2
    pool = types.SimpleNamespace(page_size=BLOCK, get_page_buffer_meta=lambda _: ([0] * parts, [0] * parts))
    written: dict[str, None] = {}
    for tp_rank in range(tp):
        for pp_rank in range(pp):
            config = HiCacheStorageConfig(
                tp_rank, tp, pp_rank, pp, 0, 1, mla, False, True, "org/Name-7B", extra_config=extra
            )
            store = MooncakeStore(config)
            store.mem_pool_host = pool
            keys, *_ = store._batch_preprocess(store._tag_keys([digest]), torch.arange(BLOCK))  # noqa: SLF001
            written |= dict.fromkeys(keys)
    return sorted(written)


class NoStore:
    """Only remembers."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def setup(self, *_: object, **__: object) -> int:
        return 0

    def put(self, key: str, value: bytes) -> int:
        self._values[key] = value
        return 0

    def is_exist(self, key: str) -> int:
        return int(key in self._values)

    def get(self, key: str) -> bytes:
        return self._values[key]


if __name__ == "__main__":
    main()
