"""One worker: what it is, as stated by the operator or told by its engine, and whether it serves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from engines.description import EngineDescription, EngineKind, Model, Role, bases
from engines.disaggregation import Prefiller
from engines.disaggregation.mooncake import own_engines
from engines.problems import other_block_size, unsettled
from indexer.types import WorkerRank
from router.http.pool import Pool
from router.workers.breaker import Breaker
from router.workers.spec import WorkerSpec

ASSUMED_BLOCK_SIZE = 16
"""Block size in tokens where neither engine nor operator states one: vLLM's default, and a divisor of other usual
ones."""
LOOPS: Final = (
    "Requests sent to this worker come back: its URL leads to this router itself, or to a router that leads back. "
    "State the URL of an engine."
)
_LOOP_REMEMBERED: Final = 300.0
"""Seconds without another such request after which a worker no longer counts as leading back."""
_UNKNOWN: Final = EngineDescription("unknown")
"""Description of a worker that has not answered yet."""

State = Literal["up", "down", "draining"]


class Worker:
    """One engine. `description` is None until it has answered once."""

    def __init__(
        self, spec: WorkerSpec, pool: Pool, breaker: Breaker | None = None, *, events_read: bool = True
    ) -> None:
        """`events_read`: whether this router reads KV events from the engine's own sockets."""
        self.spec = spec
        self.id: Final = spec.worker_id
        self.pool = pool
        self.breaker = breaker or Breaker()
        self._events_read = events_read
        self.description: EngineDescription | None = None
        self.up = False
        self.draining = False
        """It gets no new requests; those in flight go on."""
        self.trouble = "has not answered yet"
        """Why it is down, for people; "" while it is up."""
        self.engine_ids: Mapping[int, str] = {}
        """From its connector's bootstrap server, by the engine's own numbers of its data-parallel ranks."""
        self.coordinates: dict[int, Mapping[str, object]] = {}
        """Where decode workers register for pushes, by data-parallel rank; learned from the ranks' answers."""
        self.names_alike = True
        """Whether it calls its blocks in the shared store as those are called that are looked up."""
        self._looped = -math.inf
        """When a request that was sent there last came back to a router that it had passed."""
        self._named: EngineDescription | None = None
        self._model_names: frozenset[str] = frozenset()
        self._base_models: Sequence[Model] = ()
        """Both as `_named` has them."""
        self._leaves_out_zero: bool | None = None
        """Whether its answers leave out the number of cached tokens when it is 0; None: not known yet."""

    def __repr__(self) -> str:
        return f"<Worker {self.id} {self.state}{': ' + self.trouble if self.trouble else ''}>"

    @property
    def state(self) -> State:
        if self.draining:
            return "draining"
        return "up" if self.up else "down"

    @property
    def engine(self) -> EngineKind:
        return self.description.kind if self.description else "unknown"

    @property
    def ranks(self) -> list[WorkerRank]:
        size = self.description.dp_size if self.description else 1
        return [WorkerRank(self.id, rank) for rank in range(size)]

    @property
    def block_size(self) -> int:
        """In tokens: stated, else found, else assumed."""
        found = self.description.block_size if self.description else None
        return self.spec.block_size or found or ASSUMED_BLOCK_SIZE

    @property
    def cache_blocks(self) -> int | None:
        """The size of each rank's KV cache, in blocks of `block_size`; None if it does not say."""
        found = self.description
        if found is None or not found.total_blocks:
            return None
        return found.total_blocks * (found.block_size or self.block_size) // self.block_size

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence for each thing that it does not tell, or that differs from what the operator states."""
        found, stated = self.description, self.spec
        if found is None:
            return ()
        left = unsettled(
            found.problems,
            events=stated.events is not None and not found.event_sources,  # what some ranks tell is not replaced
            replay=stated.replay is not None,
            block_size=stated.block_size is not None,
            events_read=self._events_read,
        )
        return (*left, *other_block_size(stated.block_size, found.block_size))

    @property
    def has_events(self) -> bool:
        return bool(self.spec.events or (self.description and self.description.event_sources))

    @property
    def uses_store(self) -> bool:
        """Whether it can load what is found in the shared store."""
        return self.spec.store and self.names_alike

    @property
    def role(self) -> Role:
        """Stated, else found, else both."""
        if self.spec.role != "auto":
            return self.spec.role
        return (self.description.role if self.description else None) or "both"

    @property
    def connector(self) -> str | None:
        """A name of `engines.disaggregation.CONNECTORS`: stated, else found. SGLang has one only, and only where it
        does not serve requests whole."""
        if self.engine == "sglang":
            return "sglang" if self.role != "both" else None
        return self.spec.connector or (self.description.connector if self.description else None)

    @property
    def bootstrap_port(self) -> int | None:
        return self.spec.bootstrap_port or (self.description.bootstrap_port if self.description else None)

    @property
    def host(self) -> str:
        """Workers with the same host hand KV over without a network."""
        return self.spec.host or self.pool.address.host

    def prefiller(self, dp_rank: int) -> Prefiller:
        """One of its ranks as connectors need it described."""
        found = self.description or _UNKNOWN
        return Prefiller(
            self.pool.address.host,
            dp_rank,
            found.dp_size,
            self.bootstrap_port,
            own_engines(self.engine_ids, found.first_rank, found.dp_size),
            self.coordinates.get(dp_rank),
            found.version,
        )

    @property
    def models(self) -> tuple[Model, ...]:
        return self.description.models if self.description else ()

    @property
    def model_names(self) -> frozenset[str]:
        self._look_through()
        return self._model_names

    @property
    def base_models(self) -> Sequence[Model]:
        """Those of `models` that are no adapters."""
        self._look_through()
        return self._base_models

    def _look_through(self) -> None:
        """Once for each description: there may be hundreds of adapters, and as many workers to ask."""
        if self._named is not self.description:
            self._named = self.description
            self._model_names = frozenset(model.id for model in self.models)
            self._base_models = bases(self.models)

    @property
    def keeps_prefixes(self) -> bool:
        return self.description is None or self.description.keeps_prefixes

    @property
    def cuts_prompts(self) -> bool:
        return self.description is not None and self.description.cuts_prompts

    def reported(self, cached: int | None) -> int | None:
        """The number of cached tokens that an answer with usage means, `cached` being what it says. SGLang before
        0.5.22, and vLLM before 0.24, leave out a zero: a worker that has reported numbers, but never 0, means 0 by
        none."""
        if cached is None:
            return 0 if self._leaves_out_zero else None
        if self._leaves_out_zero is None or not cached:
            self._leaves_out_zero = cached > 0
        return cached

    def forget_answers(self) -> None:
        """It may be another process by now, or another engine: its next answers tell."""
        self.coordinates = {}
        self._leaves_out_zero = None

    def note_loop(self, now: float) -> bool:
        """A request that was sent there has come back to a router that it had passed. Returns whether it is the first
        in a while."""
        first, self._looped = not self.loops(now), now
        return first

    def loops(self, now: float) -> bool:
        return now - self._looped <= _LOOP_REMEMBERED

    def serves(self, model: str | None) -> bool:
        """A worker that could not be asked for its models may serve any."""
        return model is None or not self.models or model in self.model_names
