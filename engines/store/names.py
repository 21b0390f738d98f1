"""Keys that a store lists, taken apart: whose they are and which part of a block, as either engine writes them."""

from __future__ import annotations

import re
from typing import NamedTuple

_VLLM = re.compile(
    r"(?:(?P<prefix>.+)@)?(?P<model>(?!store_(?:tp|pp|format):)[^@]+)(?P<namespace>(?:@store_[a-z_]+:[^@]*)*)@tp_rank:(?P<tp>\d{1,9})@pcp(?P<pcp>\d{1,9})"
    r"@dcp(?P<dcp>\d{1,9})@pp_rank:(?P<pp>\d{1,9})@group:(?P<group>\d{1,9})@(?P<digest>[0-9a-f]+)"
)
_SGLANG = re.compile(r"(?P<start>(?:.*_)?)(?P<digest>[0-9a-f]{16,})(?P<end>_(?:[a-z0-9_]*_)?[kv])")


class VllmKey(NamedTuple):
    """See `engines.store.vllm`."""

    prefix: str
    model: str
    namespace: str
    digest: str
    tp: int
    pcp: int
    dcp: int
    pp: int
    group: int


class SglangKey(NamedTuple):
    """See `engines.store.sglang`."""

    start: str
    """Tag and model."""
    digest: str
    end: str
    """Ranks, and whether keys or values."""


def read_vllm(key: str) -> VllmKey | None:
    found = _VLLM.fullmatch(key)
    if found is None:
        return None
    ranks = (int(found[name]) for name in ("tp", "pcp", "dcp", "pp", "group"))
    return VllmKey(found["prefix"] or "", found["model"], found["namespace"], found["digest"], *ranks)


def read_sglang(key: str) -> SglangKey | None:
    found = _SGLANG.fullmatch(key)
    return SglangKey(found["start"], found["digest"], found["end"]) if found else None
