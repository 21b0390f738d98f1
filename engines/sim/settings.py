"""What a simulated fleet is made of; `engines.sim.process` has a flag for each field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from engines.description import Role
from engines.sim.timing import StepTiming, flag_of

FlavourName = Literal["vllm", "sglang"]
ConnectorName = Literal["none", "nixl", "nixl-push", "mooncake", "store", "sglang"]

BOOTSTRAP_PORT_OFFSET = 500
EVENT_PORT_OFFSET = 1000


@dataclass(frozen=True)
class SimSettings:
    """ValueError for numbers that make no engine."""

    workers: int = 8
    host: str = "127.0.0.1"
    port: int = 0
    """HTTP port of the first worker, the others follow; bootstrap servers are on port + 500 and up, events on
    port + 1000 and up. 0: free ports."""
    flavour: FlavourName = "vllm"
    model: str = "sim"
    loras: tuple[str, ...] = ()
    """Further model names, each an adapter with prefixes of its own."""
    max_loras: int | None = None
    """Adapters that each rank runs at once; None: any number."""
    block_size: int = 16
    cache_tokens: int = 262_144
    """Per rank."""
    speedup: float = 1.0
    """Simulated seconds per second."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    dp_size: int = 1
    max_model_len: int = 131_072
    """Never above `cache_tokens`: a longer request could not run."""
    tokenizer: str | None = None
    """Folder with a tokenizer.json, or the file itself; None: one token per UTF-8 byte."""
    kv_events: bool = True
    slow: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Worker index to the factor that its steps take longer."""
    seed: int = 0
    """Seeds the words that answers are made of, and request ids."""
    timing: StepTiming = field(default_factory=StepTiming)
    roles: Mapping[int, Role] = field(default_factory=lambda: MappingProxyType({}))
    """Worker index to what it does of a request; the others do both."""
    connector: ConnectorName = "none"
    """How KV goes from prefill to decode workers."""
    transfer_gb_s: float = 50.0
    """Bandwidth for one request's KV: 400 Gbit/s, the network card that each GPU of a DGX H100 has."""
    kv_bytes_per_token: int = 131_072
    """Llama-3.1-8B's, see `timing`."""
    transfer_base_s: float = 0.005
    """Simulated seconds of every transfer, however small."""
    lease_s: float = 30.0
    """Simulated seconds that a prefill's KV is kept for a decode that does not come."""

    def __post_init__(self) -> None:
        for name in ("workers", "block_size", "max_num_seqs", "max_num_batched_tokens", "dp_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag_of(name)} must be at least 1")
        if self.max_loras is not None and self.max_loras < 1:
            raise ValueError("--max-loras must be at least 1")
        if self.cache_blocks < 1:
            raise ValueError(f"--cache-tokens must hold a block, of {self.block_size} tokens (--block-size)")
        if not 0 < self.speedup < math.inf:
            raise ValueError("--speedup must be a number above 0")
        if self.max_num_batched_tokens < self.max_num_seqs:  # vLLM's rule too
            raise ValueError("--max-num-batched-tokens must not be below --max-num-seqs")
        if any(not 0 < factor < math.inf or not 0 <= index < self.workers for index, factor in self.slow.items()):
            raise ValueError("--slow takes the index of a worker, from 0 on, and a factor above 0")
        self._check_names()
        if self.port < 0 or self.last_port > 65535:  # what binds takes the rest of a division by 65536, in silence
            raise ValueError(f"--port must be from 0 on, and leave room for all ports up to 65535, not {self.port}")
        self._check_ports_differ()
        self._check_pairs()

    def _check_names(self) -> None:
        if not self.host:
            raise ValueError("--host must not be empty; 0.0.0.0 stands for all addresses")
        names = (self.model, *self.loras)
        if "" in names or len({*names}) < len(names):
            raise ValueError("--model and each --lora need a name of their own")

    def _check_ports_differ(self) -> None:
        """The ranges of a large fleet's ports reach into each other."""
        uses: dict[int, str] = {}
        for port, use in self.ports():
            if (other := uses.setdefault(port, use)) != use:
                raise ValueError(f"port {port} would be for both {other} and {use}: give --port 0 for so many workers")

    def _check_pairs(self) -> None:
        if any(not 0 <= index < self.workers for index in self.roles):
            raise ValueError("--role takes the index of a worker, from 0 on")
        if self.connector == "none" and any(role != "both" for role in self.roles.values()):
            raise ValueError("--role prefill and decode need a --connector")
        if self.connector != "none" and (self.connector == "sglang") != (self.flavour == "sglang"):
            raise ValueError("--connector sglang is for --flavour sglang, and the only one for it")
        for name in ("transfer_gb_s", "kv_bytes_per_token"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{flag_of(name)} must be above 0")
        if not 0 < self.lease_s < math.inf:
            raise ValueError("--lease-s must be a number of seconds above 0")
        if not 0 <= self.transfer_base_s < math.inf:
            raise ValueError("--transfer-base-s must be a number of seconds, not below 0")

    @property
    def last_port(self) -> int:
        """The greatest that is taken; 0 where they are free ones."""
        if self.port == 0:
            return 0
        if self.kv_events:
            return self.port + EVENT_PORT_OFFSET + 2 * self.dp_size * self.workers - 1
        return self.port + max(self.workers - 1, *(BOOTSTRAP_PORT_OFFSET + index for index in self._bootstraps()), 0)

    def ports(self) -> Iterator[tuple[int, str]]:
        """Each that is taken, and what for; none where they are free ones. HTTP comes first, since --port names it."""
        if self.port == 0:
            return
        for index in range(self.workers):
            yield self.port + index, f"worker {index}'s HTTP"
        for index in self._bootstraps():
            yield self.port + BOOTSTRAP_PORT_OFFSET + index, f"worker {index}'s bootstrap server"
        each = 2 * self.dp_size if self.kv_events else 0  # every rank's events, then every rank's replay
        for number in range(each * self.workers):
            yield self.port + EVENT_PORT_OFFSET + number, f"worker {number // each}'s KV events"

    def _bootstraps(self) -> list[int]:
        """Workers that have a bootstrap server."""
        bootstrapped = self.connector in {"mooncake", "sglang"}
        return [index for index, role in self.roles.items() if bootstrapped and role == "prefill"]

    @property
    def cache_blocks(self) -> int:
        return self.cache_tokens // self.block_size

    @property
    def context_length(self) -> int:
        """Tokens that one request may have, prompt and answer together."""
        return min(self.max_model_len, self.cache_blocks * self.block_size)
