"""What a worker turns out to be, and what could not be found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

EngineKind = Literal["vllm", "sglang", "unknown"]
MOST_RANKS = 1024
"""More data-parallel ranks of one worker than this are a mistake, and each would be a socket."""
Role = Literal["prefill", "decode", "both"]
"""What a worker does of a request: its prompt for another, the answer to another's prompt, or all of it."""


class Model(msgspec.Struct, frozen=True):
    """A served model. `root` is the path or name it was loaded from; `parent` is set for a LoRA adapter."""

    id: str
    root: str | None = None
    max_model_len: int | None = None
    parent: str | None = None

    @property
    def adapter(self) -> str | None:
        """An adapter's own name, by which its blocks are hashed; None for a base model. SGLang's adapters are asked for
        as `parent:adapter`."""
        return None if self.parent is None else self.id.removeprefix(f"{self.parent}:")


def bases(models: Sequence[Model]) -> list[Model]:
    """The base models among them: those that are no adapters."""
    return [model for model in models if model.parent is None]


class EventSource(msgspec.Struct, frozen=True):
    """One rank's ZMQ endpoints as a client connects to them (no wildcards left); `replay` None: there is none."""

    dp_rank: int
    endpoint: str
    replay: str | None = None
    topic: str = ""


class EngineDescription(msgspec.Struct, frozen=True):
    """`problems`: one sentence each for what was not found, naming the flag that supplies it."""

    kind: EngineKind
    version: str | None = None
    models: tuple[Model, ...] = ()
    block_size: int | None = None
    dp_size: int = 1
    first_rank: int = 0
    """What the engine calls the rank that is 0 here. Several servers of one data-parallel engine count theirs together,
    but each takes requests for its own from 0 on, unless it says otherwise (`asked_from`)."""
    asked_from: int = 0
    """What a request calls the rank that is 0 here."""
    event_sources: tuple[EventSource, ...] = ()
    total_blocks: int | None = None
    """KV blocks per rank."""
    kv_dtype: str | None = None
    """The type of the numbers in its cache, as it was stated to the engine: `auto` is the model's own type."""
    max_running: int | None = None
    """Requests that run at once per rank."""
    max_loras: int | None = None
    """LoRA adapters that run at once per rank."""
    tokenizer_path: str | None = None
    keeps_prefixes: bool = True
    """False: its prefix cache is off, so it never holds anything of an earlier prompt."""
    cuts_prompts: bool = False
    """It cuts a prompt that is longer than its context, and does not refuse it."""
    role: Role | None = None
    """None: it does not tell, as vLLM does not."""
    connector: str | None = None
    """A name of `engines.disaggregation.CONNECTORS`; None: it does not tell, or has none."""
    bootstrap_port: int | None = None
    problems: tuple[str, ...] = ()
