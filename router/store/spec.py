"""The shared store as the operator names it: `http://MASTER:METRICS_PORT[,key=value…]`, or a mapping in YAML."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, get_args

import msgspec

from engines.endpoints import url_host
from engines.store import HashName
from publishers.urls import is_host, split_url

RPC_PORT = 50051
"""Of `mooncake_master --rpc_port`, by default."""
_RPC = re.compile(r"[^\s/]+:[0-9]{1,5}")
Count = Annotated[int, msgspec.Meta(ge=1)]
_COUNTS, _OR_NONE = "a whole number of at least 1", "a whole number of at least 0"
_TAKES = {
    "hash": " or ".join(get_args(HashName)),
    **dict.fromkeys(("tp", "pp", "block_size"), _COUNTS),
    **dict.fromkeys(("keep", "warm", "copy"), _OR_NONE),
    "budget_ms": "a number of milliseconds above 0",
}
"""What each key takes that does not take text."""


class StoreSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """None: found out, from the engines or from the keys that are there.

    `url`: of the master's HTTP surface. `model`: as it stands in the keys. `hash`, `hash_seed`: vLLM's
    `--prefix-caching-hash-algo` and PYTHONHASHSEED. `tp`, `pp`: ranks that each keep a part of a block. `block_size` in
    tokens. `budget_ms`: how long a request waits for an answer. `keep`: objects of hot prefixes that are kept from
    eviction. `warm`: hot prefixes that a worker takes in before it serves. `copy`: objects of hot prefixes that may lie
    in two segments, for which Mooncake's client asks the master at `rpc`, HOST:PORT.
    """

    url: str
    model: str | None = None
    hash: HashName = "sha256"
    hash_seed: str | None = None
    tp: Count | None = None
    pp: Count = 1
    block_size: Count | None = None
    budget_ms: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    keep: Annotated[int, msgspec.Meta(ge=0)] = 0
    warm: Annotated[int, msgspec.Meta(ge=0)] = 0
    copy: Annotated[int, msgspec.Meta(ge=0)] = 0
    rpc: str | None = None

    @property
    def rpc_address(self) -> str:
        """Stated, else the port that a master takes, on the host of its HTTP surface."""
        return self.rpc or f"{url_host(split_url(self.url).hostname or '')}:{RPC_PORT}"


def read_store(value: object) -> object:
    """Text or a mapping as a StoreSpec, anything else as it is. ValueError says what is wrong."""
    if isinstance(value, str):
        if value == "none":
            return None
        url, *rest = value.strip().split(",")
        pairs = [part.partition("=") for part in rest]
        if any(not equals for _, equals, _ in pairs):
            raise ValueError(f"{value!r} is not http://HOST:PORT[,key=value...].")
        stated = {"url": url, **{key: given for key, _, given in pairs}}
        if len(stated) <= len(pairs):
            raise ValueError(f"a key is given twice in {value!r}.")
        return _from(stated, strict=False)
    return _from(value, strict=True) if isinstance(value, Mapping) else value


def _from(mapping: Mapping[str, object], *, strict: bool) -> StoreSpec:
    known = StoreSpec.__struct_fields__
    for key in mapping:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known[1:])}."
            raise ValueError(f"the store has no {str(key)!r}; {hint}")
    stated = {key: value for key, value in mapping.items() if value != "auto"}
    if not is_address(str(stated.get("url", ""))):
        raise ValueError("the store's url is that of the master's metrics port, such as http://10.0.0.5:9003.")
    for key, value in stated.items():
        if not _fits(key, value, strict=strict):
            raise ValueError(f"the store's {key} takes {_TAKES.get(key, 'text, in quotes')}, not {value!r}.")
    spec = msgspec.convert(stated, StoreSpec, strict=strict)
    if spec.rpc and not _RPC.fullmatch(spec.rpc):
        raise ValueError("the store's rpc is HOST:PORT, of the master's --rpc_port, such as 10.0.0.5:50051.")
    return msgspec.structs.replace(spec, url=spec.url.rstrip("/"))


def _fits(key: str, value: object, *, strict: bool) -> bool:
    try:
        msgspec.convert({"url": "", key: value}, StoreSpec, strict=strict)
    except msgspec.ValidationError:
        return False
    return True


def is_address(url: str) -> bool:
    """Whether it is that of a web server: without a user, a query or a fragment."""
    try:
        parts = split_url(url)
        user, port = parts.username, parts.port
    except ValueError:  # a port or an IPv6 address that is none
        return False
    plain = re.fullmatch(r"[!-~]+", url) and not set("?#") & set(url)
    return (
        bool(plain) and parts.scheme in {"http", "https"} and is_host(parts.hostname or "") and port != 0 and not user
    )
