"""What the keys that a store lists tell of who keeps blocks there: which models, and in how many parts each block."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engines.description import EngineKind
from engines.store.names import SglangKey, VllmKey, read_sglang, read_vllm


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model, in one layout. `engine` unknown: keys that no engine known here has written."""

    engine: EngineKind
    model: str
    """As it stands in the keys; SGLang's with its tag."""
    namespace: str = ""
    keys: int
    blocks: int
    """Distinct digests."""
    parts: int
    """Objects that a block has at most."""
    tp: int = 1
    pp: int = 1
    """Ranks that the keys name, from 0 on."""
    groups: int = 1
    """Of layers."""
    digest_bits: int = 0


def survey(keys: Iterable[str]) -> list[Kept]:
    """Those with most keys first."""
    vllm: dict[tuple[str, str], list[VllmKey]] = {}
    sglang: dict[str, list[SglangKey]] = {}
    unknown = 0
    for key in keys:
        if ours := read_vllm(key):
            model = f"{ours.prefix}@{ours.model}" if ours.prefix else ours.model
            vllm.setdefault((model, ours.namespace), []).append(ours)
        elif theirs := read_sglang(key):
            sglang.setdefault(theirs.start.rstrip("_"), []).append(theirs)
        else:
            unknown += 1
    kept = [_vllm(*owner, found) for owner, found in vllm.items()]
    kept += [_sglang(model, found) for model, found in sglang.items()]
    if unknown:
        kept.append(Kept(engine="unknown", model="", keys=unknown, blocks=0, parts=0))
    return sorted(kept, key=lambda one: -one.keys)


def _vllm(model: str, namespace: str, keys: list[VllmKey]) -> Kept:
    digests = {key.digest for key in keys}
    return Kept(
        engine="vllm",
        model=model,
        namespace=namespace,
        keys=len(keys),
        blocks=len(digests),
        parts=len({key._replace(digest="") for key in keys}),
        tp=1 + max(key.tp for key in keys),
        pp=1 + max(key.pp for key in keys),
        groups=len({key.group for key in keys}),
        digest_bits=max(map(len, digests)) * 4,
    )


def _sglang(model: str, keys: list[SglangKey]) -> Kept:
    digests, ends = {key.digest for key in keys}, {key.end for key in keys}
    ranks = [_ranks(end) for end in ends]
    return Kept(
        engine="sglang",
        model=model,
        keys=len(keys),
        blocks=len(digests),
        parts=len(ends),
        tp=1 + max(tp for tp, _ in ranks),
        pp=1 + max(pp for _, pp in ranks),
        digest_bits=max(map(len, digests)) * 4,
    )


def _ranks(end: str) -> tuple[int, int]:
    """Of SGLang's `_TP_k`, `_TP_PP_k`; MLA's `_PP_k` cannot be told from the first, and is taken for it."""
    numbers = [int(part) for part in end.split("_") if part.isdigit()]
    tp, pp, *_ = (*numbers, 0, 0)
    return tp, pp
