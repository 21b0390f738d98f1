"""The workers: what each is, whether it serves, and who could take a request."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from engines.description import EngineDescription, EngineKind, Model, Role, bases
from engines.disaggregation import Prefiller
from engines.disaggregation.mooncake import own_engines
from engines.problems import other_block_size
from indexer.types import WorkerRank
from publishers.logs import log_event
from router.breaker import Breaker
from router.http.pool import Pool
from router.scheduling.decision import Candidates, Split
from router.split.pairing import make_split, ranks_of
from router.worker_spec import WorkerSpec

logger = logging.getLogger("router.fleet")

_MOST_EXCLUSIONS: Final = 256
"""Sets of excluded workers for which candidates are cached."""
ASSUMED_BLOCK_SIZE = 16
"""Block size in tokens where neither engine nor operator states one: vLLM's default, and a divisor of other usual
ones."""
LEADS_BACK: Final = (
    "Requests sent to this worker come back: its URL leads to this router itself, or to a router that leads back. "
    "State the URL of an engine."
)
_CAME_BACK_LATELY: Final = 300.0
"""Seconds without another such request after which a worker no longer counts as leading back."""
_UNKNOWN: Final = EngineDescription("unknown")
"""Description of a worker that has not answered yet."""

State = Literal["up", "down", "draining"]


class Worker:
    """One engine. `description` is None until it has answered once."""

    def __init__(self, spec: WorkerSpec, pool: Pool, breaker: Breaker | None = None) -> None:
        self.spec = spec
        self.id: Final = spec.worker_id
        self.pool = pool
        self.breaker = breaker or Breaker()
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
        self._came_back = -math.inf
        """When a request that was sent there last came back to a router that it had passed."""
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
    def problems(self) -> tuple[str, ...]:
        """A sentence for each thing that it does not tell, or that differs from what the operator states."""
        found = self.description
        return (*found.problems, *other_block_size(self.spec.block_size, found.block_size)) if found else ()

    @property
    def has_events(self) -> bool:
        return bool(self.spec.events or (self.description and self.description.event_sources))

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

    def reported(self, cached: int | None) -> int | None:
        """The number of cached tokens that an answer with usage means, `cached` being what it says. SGLang up to
        0.5.18, and older vLLM, leave out a zero: a worker that has reported numbers, but never 0, means 0 by none."""
        if cached is None:
            return 0 if self._leaves_out_zero else None
        if self._leaves_out_zero is None or not cached:
            self._leaves_out_zero = cached > 0
        return cached

    def came_back(self, now: float) -> bool:
        """A request that was sent there has come back to a router that it had passed. Returns whether it is the first
        in a while."""
        first, self._came_back = not self.leads_back(now), now
        return first

    def leads_back(self, now: float) -> bool:
        return now - self._came_back <= _CAME_BACK_LATELY

    def serves(self, model: str | None) -> bool:
        """A worker that could not be asked for its models may serve any."""
        return model is None or not self.models or any(known.id == model for known in self.models)


class ContextLengths(NamedTuple):
    """Of one model, in tokens, as far as its workers tell. `most` None: not all of them do."""

    by_worker: Mapping[str, int]
    least: int | None
    most: int | None

    def under(self, tokens: int) -> frozenset[str]:
        """Workers whose context is shorter than that."""
        return frozenset(worker for worker, limit in self.by_worker.items() if limit < tokens)


class Fleet:
    """All workers. What requests ask for is worked out once, and kept until a worker changes."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.workers = {worker.id: worker for worker in workers}
        self._forget()

    def _forget(self) -> None:
        self._candidates: dict[str | None, Candidates] = {}
        self._without: dict[tuple[str | None, frozenset[str]], Candidates] = {}
        self._ranks: dict[str, Candidates] = {}
        self._models: dict[str, tuple[Worker, Model]] | None = None
        self._bases: dict[str | None, Model] | None = None
        self._lengths: dict[str, ContextLengths] = {}
        self._block_sizes: frozenset[int] | None = None

    def add(self, worker: Worker) -> None:
        self.workers[worker.id] = worker
        self._forget()

    def remove(self, worker: Worker) -> None:
        """It stays marked as draining, for those who still hold it."""
        worker.draining = True
        del self.workers[worker.id]
        self._forget()

    def drain(self, worker: Worker, draining: bool) -> None:
        """Start or stop draining `worker`."""
        worker.draining = draining
        self._forget()

    def restate(self, worker: Worker, spec: WorkerSpec) -> None:
        """Replace what the operator states of `worker`, from the next request on; its id stays the same."""
        worker.spec = spec
        self._forget()

    def redescribe(self, worker: Worker, found: EngineDescription) -> None:
        """Replace its description: it serves other adapters than before, or is another engine."""
        worker.description = found
        self._forget()

    def mark_up(self, worker: Worker) -> None:
        """`worker` serves, as its description now says."""
        worker.up, worker.trouble = True, ""
        worker.coordinates = {}  # it may be another process; its next answers tell
        worker.breaker.reset()
        self._forget()

    def mark_down(self, worker: Worker, trouble: str) -> None:
        """`worker` gets nothing until it is marked up again; what it has in flight goes on."""
        if worker.up:
            log_event(logger, logging.WARNING, "Worker is down", worker=worker.id, trouble=trouble)
        worker.up, worker.trouble = False, trouble
        self._forget()

    # -- breakers

    def sent(self, worker: Worker, now: float) -> None:
        """A request goes there."""
        if worker.breaker.sent(now):
            self._forget()

    def answered(self, worker: Worker, now: float) -> None:
        """It has begun to answer a request, other than with an error of its own."""
        if worker.breaker.succeeded(now):
            log_event(logger, logging.INFO, "Worker answers again", worker=worker.id)
            self._forget()

    def failed(self, worker: Worker, now: float) -> None:
        if worker.breaker.failed(now):
            log_event(logger, logging.WARNING, "Worker keeps failing: it gets nothing for a while", worker=worker.id)
            self._forget()

    def came_back(self, worker: Worker, now: float) -> None:
        """A request that was sent there has come back to a router that it had passed."""
        if worker.came_back(now):
            log_event(logger, logging.WARNING, LEADS_BACK, worker=worker.id)

    def trip(self, worker: Worker, reason: str, now: float) -> None:
        """Open the worker's breaker: it does not work properly, whatever its health check says."""
        log_event(logger, logging.WARNING, "Worker gets nothing for a while", worker=worker.id, reason=reason)
        worker.breaker.trip(now)
        self._forget()

    def tick(self, now: float) -> None:
        """To be called once a second: workers that were kept out for a while may be tried again."""
        changed = [worker.id for worker in self.workers.values() if worker.breaker.tick(now)]
        if changed:
            self._forget()

    def learn_engine_ids(self, worker: Worker, ids: Mapping[int, str]) -> None:
        """`ids`: what its bootstrap server has just answered; {} for no usable answer."""
        if worker.engine_ids != ids:
            worker.engine_ids = ids
            self._forget()

    @property
    def up(self) -> list[Worker]:
        """Workers that get requests, so without those that drain."""
        return [worker for worker in self.workers.values() if worker.state == "up"]

    @property
    def block_sizes(self) -> frozenset[int]:
        if self._block_sizes is None:
            self._block_sizes = frozenset(worker.block_size for worker in self.up)
        return self._block_sizes

    def candidates(self, model: str | None, exclude: Collection[str] = ()) -> Candidates:
        """The ranks of all that are up and serve `model`, less those of the workers in `exclude`."""
        found = self._candidates.get(model)
        if found is None:
            found = self._serving(model, ())
            if model is None or self.knows(model):  # any name may come from outside: only known ones are kept
                self._candidates[model] = found
        if not exclude:
            return found
        return self._without_those(model, frozenset(exclude))

    def _without_those(self, model: str | None, exclude: frozenset[str]) -> Candidates:
        """The same object for all requests that exclude the same workers, so that they wait in one lane."""
        found = self._without.get((model, exclude))
        if found is None:
            found = self._serving(model, exclude)
            if model in self._candidates:
                if len(self._without) >= _MOST_EXCLUSIONS:
                    self._without.clear()
                self._without[model, exclude] = found
        return found

    def candidates_of(self, worker: Worker, model: str | None, exclude: Collection[str] = ()) -> Candidates:
        """The same, of `worker` alone."""
        if worker.state != "up" or not worker.serves(model) or worker.id in exclude or worker.role != "both":
            return _NOBODY
        found = self._ranks.get(worker.id)
        if found is None:
            found = self._ranks[worker.id] = ranks_of([worker])
        return found

    def _serving(self, model: str | None, exclude: Collection[str]) -> Candidates:
        able = [worker for worker in self.up if worker.serves(model) and worker.id not in exclude]
        well = _candidates(worker for worker in able if worker.breaker.admits)
        # If no worker with a closed breaker can serve, a first try may go to any: the breakers may all be wrong.
        return well if well or exclude else _candidates(able)

    def split_of(self, prefill: Worker, model: str | None, exclude: Collection[str] = ()) -> Split | None:
        """Decode workers to which `prefill` may hand over what it has computed, even if it drains itself; those that
        drain only if there are no others."""
        if not prefill.up:
            return None
        able = [one for one in self.workers.values() if one.up and one.serves(model) and one.id not in exclude]
        decodes = [one for one in able if one.role != "prefill"]
        takers = [one for one in decodes if one.breaker.admits and not one.draining]
        return make_split([prefill, *takers]) or make_split([prefill, *decodes])

    def knows(self, model: str) -> bool:
        """Whether any worker, up or not, is known to serve `model`."""
        workers = self.workers.values()
        return any(known.id == model for worker in workers for known in worker.models)

    @property
    def has_one_model(self) -> bool:
        """Whether the workers, up or not, are known to serve but one base model, under whatever names."""
        known = bases([model for worker in self.workers.values() for model in worker.models])
        return not known or _are_one(known)

    def may_serve(self, model: str) -> bool:
        """False only when there are workers, all have told their models, and none is `model`."""
        if not self.workers or model in self._candidates:
            return True
        return any(worker.serves(model) for worker in self.workers.values())

    def models(self) -> Mapping[str, tuple[Worker, Model]]:
        """All models served, by name, each with the first worker that has it; the same object until that changes."""
        if self._models is None:
            self._models = {}
            for worker in self.up:
                for model in worker.models:
                    self._models.setdefault(model.id, (worker, model))
        return self._models

    def base_model(self, name: str | None) -> Model | None:
        """The base model behind `name`, an adapter's or its own; a request may leave out the name of the only one."""
        if self._bases is None:
            self._bases = _bases([model for _, model in self.models().values()])
        return self._bases.get(name)

    def context_lengths(self, base: str) -> ContextLengths:
        """Of the base model of that name. Workers may be started with different context lengths."""
        found = self._lengths.get(base)
        if found is None:
            serving = [(worker.id, model) for worker in self.up for model in worker.models if model.id == base]
            known = {worker: model.max_model_len for worker, model in serving if model.max_model_len}
            most = max(known.values()) if known and len(known) == len(serving) else None
            found = self._lengths[base] = ContextLengths(known, min(known.values(), default=None), most)
        return found

    def lora_name(self, model: str | None) -> str | None:
        """The adapter's name if `model` is one: engines hash it into the blocks."""
        found = self.models().get(model) if model else None
        return found[1].adapter if found else None


def _candidates(able: Iterable[Worker]) -> Candidates:
    """By role: the ranks that serve requests whole, and the pairs that split them."""
    found = list(able)
    return ranks_of([worker for worker in found if worker.role == "both"], make_split(found))


_NOBODY = Candidates([])


def _bases(models: Sequence[Model]) -> dict[str | None, Model]:
    """Base models by every name that a request may use; None if there is only one, by whatever names."""
    known = {model.id: model for model in models}
    found: dict[str | None, Model] = {m.id: known.get(m.parent, m) if m.parent else m for m in models}
    base = bases(models)
    return found | {None: base[0]} if base and _are_one(base) else found


def _are_one(known: Sequence[Model]) -> bool:
    """Whether base models are but one: by its name wherever it was loaded from, or under several names from one
    place."""
    return len({model.id for model in known}) == 1 or len({model.root or model.id for model in known}) == 1
