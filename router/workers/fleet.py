"""All workers together: who could take a request now, which models are served, and what keeps a worker out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from engines.description import EngineDescription, EngineKind, Model, bases
from indexer.types import PLAIN, Namespace
from publishers.logs import log_event
from router.scheduling.candidates import Candidates, Split
from router.split.pairing import make_split, ranks_of
from router.workers.spec import WorkerSpec
from router.workers.worker import LOOPS, Worker

logger = logging.getLogger(__name__)

_NONE: Final[frozenset[str]] = frozenset()
_Name: TypeAlias = str | int | None
"""A model as requests name it: a name that some worker is known to serve; `_STRANGE` for all other names; None where
they name none."""
_STRANGE: Final = 0
_MOST_EXCLUSIONS: Final = 1024
"""Sets of excluded workers for which candidates are cached, each some 20 kB where there are a thousand workers. With
more of them among the held requests at a time, the cache would be of no use."""


class ContextLengths(NamedTuple):
    """The context lengths of one model, in tokens, on the workers that tell theirs and refuse longer prompts. `most` is
    None if not all workers with the model do."""

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
        self._urls: frozenset[str] | None = None
        self._invalidate()

    def _invalidate(self) -> None:
        self._candidates: dict[_Name, Candidates] = {}
        self._of_workers: dict[tuple[str, ...], Candidates] = {}
        self._without: dict[tuple[_Name, bool, frozenset[str], frozenset[str]], Candidates] = {}
        self._alone: dict[tuple[_Name, frozenset[str]], Candidates] = {}
        self._ranks: dict[str, Candidates] = {}
        self._models: dict[str, tuple[Worker, Model]] | None = None
        self._down: dict[str, Model] | None = None
        self._bases: dict[str | None, Model] | None = None
        self._down_bases: dict[str | None, Model] | None = None
        self._prompt_names: dict[str | None, str] = {}
        self._lengths: dict[str, ContextLengths] = {}
        self._block_sizes: frozenset[int] | None = None
        self._admitting: frozenset[str] | None = None
        self._names: frozenset[str] | None = None
        self._one_model: bool | None = None
        self._others: dict[EngineKind, frozenset[str]] = {}
        self._adapters: dict[EngineKind, frozenset[str]] = {}

    def add(self, worker: Worker) -> None:
        self.workers[worker.id] = worker
        self._urls = None
        self._invalidate()

    def remove(self, worker: Worker) -> None:
        """It stays marked as draining, for those who still hold it."""
        worker.draining = True
        del self.workers[worker.id]
        self._urls = None
        self._invalidate()

    def drain(self, worker: Worker, draining: bool) -> None:
        """Start or stop draining `worker`."""
        worker.draining = draining
        self._invalidate()

    def restate(self, worker: Worker, spec: WorkerSpec) -> None:
        """Replace what the operator states of `worker`, from the next request on; its id stays the same."""
        worker.spec = spec
        self._invalidate()

    def redescribe(self, worker: Worker, found: EngineDescription) -> None:
        """Replace its description: it serves other adapters than before, or is another engine."""
        worker.description = found
        self._invalidate()

    def mark_up(self, worker: Worker) -> None:
        """`worker` serves, as its description now says."""
        worker.up, worker.trouble = True, ""
        worker.forget_answers()
        worker.breaker.reset()
        self._invalidate()

    def mark_down(self, worker: Worker, trouble: str) -> None:
        """`worker` gets nothing until it is marked up again; what it has in flight goes on."""
        was_up, worker.up, worker.trouble = worker.up, False, trouble
        if was_up:  # each of its requests that fail now says so again
            log_event(logger, logging.WARNING, "Worker is down", worker=worker.id, trouble=trouble)
            self._invalidate()

    # -- breakers

    def sent(self, worker: Worker, now: float) -> None:
        """A request goes there."""
        if worker.breaker.sent(now):
            self._invalidate()

    def answered(self, worker: Worker, now: float) -> None:
        """It has begun to answer a request, other than with an error of its own."""
        if worker.breaker.succeeded(now):
            log_event(logger, logging.INFO, "Worker answers again", worker=worker.id)
            self._invalidate()

    def failed(self, worker: Worker, now: float) -> None:
        if worker.breaker.failed(now):
            log_event(logger, logging.WARNING, "Worker keeps failing: it gets nothing for a while", worker=worker.id)
            self._invalidate()

    def loop_found(self, worker: Worker, now: float) -> None:
        """A request that was sent there has come back to a router that it had passed."""
        if worker.note_loop(now):
            log_event(logger, logging.WARNING, LOOPS, worker=worker.id)

    def trip(self, worker: Worker, reason: str, now: float) -> None:
        """Open the worker's breaker: it does not work properly, whatever its health check says."""
        log_event(logger, logging.WARNING, "Worker gets nothing for a while", worker=worker.id, reason=reason)
        worker.breaker.trip(now)
        self._invalidate()

    def tick(self, now: float) -> None:
        """To be called once a second: workers that were kept out for a while may be tried again."""
        changed = [worker.id for worker in self.workers.values() if worker.breaker.tick(now)]
        if changed:
            self._invalidate()

    def learn_engine_ids(self, worker: Worker, ids: Mapping[int, str]) -> None:
        """`ids`: what its bootstrap server has just answered; {} for no usable answer."""
        if worker.engine_ids != ids:
            worker.engine_ids = ids
            self._invalidate()

    @property
    def urls(self) -> frozenset[str]:
        """Of all workers: the same object until one comes or goes."""
        if self._urls is None:
            self._urls = frozenset(worker.spec.url for worker in self.workers.values())
        return self._urls

    @property
    def up(self) -> list[Worker]:
        """Workers that get requests, so without those that drain."""
        return [worker for worker in self.workers.values() if worker.state == "up"]

    @property
    def block_sizes(self) -> frozenset[int]:
        """Of the workers that are up. While none is, of those known: requests may be held until they are back."""
        if self._block_sizes is None:
            known = self.up or [worker for worker in self.workers.values() if worker.description]
            self._block_sizes = frozenset(worker.block_size for worker in known)
        return self._block_sizes

    def other_engines(self, kind: EngineKind) -> frozenset[str]:
        """Workers that are known to run another engine."""
        found = self._others.get(kind)
        if found is None:
            others = (worker.id for worker in self.workers.values() if worker.engine not in {kind, "unknown"})
            found = self._others[kind] = frozenset(others)
        return found

    def candidates(self, model: str | None, exclude: Collection[str] = (), unfit: frozenset[str] = _NONE) -> Candidates:
        """The ranks of all that are up and serve `model`, less those of the workers in `exclude`, which have failed the
        request, and in `unfit`, which cannot serve it."""
        name = self._name(model)
        found = self._candidates.get(name)
        if found is None:
            found = self._candidates[name] = self._all_serving(model)
        if not exclude and not unfit:
            return found
        return self._without_those(model, frozenset(exclude), unfit)

    def _all_serving(self, model: str | None) -> Candidates:
        """All models that the same workers serve, such as the adapters of a base model, share one object: for a
        thousand ranks it takes milliseconds to make, and so do the figures that are kept for each set of
        candidates."""
        able = self._able(model, _NONE)
        key = tuple(worker.id for worker in able)
        found = self._of_workers.get(key)
        if found is None:
            found = self._of_workers[key] = self._serving(able, first=True)
        return found

    def _name(self, model: str | None) -> _Name:
        """Clients may send any name. All names that nobody is known to serve have the same candidates (the workers that
        may serve any model), and their requests wait in one lane."""
        return model if model is None or self.knows(model) else _STRANGE

    def _without_those(self, model: str | None, exclude: frozenset[str], unfit: frozenset[str]) -> Candidates:
        """Requests that have the same workers left share one object, so that they wait in one lane. Otherwise, when a
        hundred workers have died, the requests that each has failed would have a lane of their own, and each lane
        costs time in every pass."""
        name, first, exclude = self._name(model), not exclude, exclude & self._admitting_workers()
        found = self._without.get((name, first, exclude, unfit))
        if found is None:
            found = self._serving(self._able(model, exclude | unfit), first)
            if found and not exclude and not unfit:
                found = self._candidates[name]
            if len(self._without) >= _MOST_EXCLUSIONS:
                self._without.clear()
            self._without[name, first, exclude, unfit] = found
        return found

    def _admitting_workers(self) -> frozenset[str]:
        """Workers that may get a request now, whatever they serve. All others are left out of any second try anyway."""
        if self._admitting is None:
            self._admitting = frozenset(worker.id for worker in self.up if worker.breaker.admits)
        return self._admitting

    def candidates_alone(self, model: str | None, exclude: Collection[str], unfit: frozenset[str]) -> Candidates:
        """As `candidates`, for a request that cannot be served in two parts."""
        well = self.candidates(model, exclude, unfit).whole
        if well or exclude:
            return well
        name = self._name(model)
        found = self._alone.get((name, unfit))
        if found is None:  # as in `_serving`, but here pairs with closed breakers are not enough
            found = ranks_of([worker for worker in self._able(model, unfit) if worker.role == "both"])
            self._alone[name, unfit] = found
        return found

    def names_adapter(self, model: str | None, kind: EngineKind) -> bool:
        """Whether `model` is an adapter's name to a worker of that engine, up or not."""
        found = self._adapters.get(kind)
        if found is None:
            models = (known for worker in self.workers.values() if worker.engine == kind for known in worker.models)
            found = self._adapters[kind] = frozenset(known.id for known in models if known.parent is not None)
        return model in found

    def candidates_of(self, worker: Worker, model: str | None, exclude: Collection[str] = ()) -> Candidates:
        """As `candidates`, of `worker` alone."""
        if worker.state != "up" or not worker.serves(model) or worker.id in exclude or worker.role != "both":
            return _NOBODY
        found = self._ranks.get(worker.id)
        if found is None:
            found = self._ranks[worker.id] = ranks_of([worker])
        return found

    def _serving(self, able: Sequence[Worker], first: bool) -> Candidates:
        """The candidates among the workers that are able. `first`: no worker has failed the request yet."""
        well = _candidates(worker for worker in able if worker.breaker.admits)
        # If no worker with a closed breaker can serve, a first try may go to any: the breakers may all be wrong.
        return well if well or not first else _candidates(able)

    def _able(self, model: str | None, out: frozenset[str]) -> list[Worker]:
        """Workers that are up and serve `model`, without those in `out`."""
        return [worker for worker in self.up if worker.serves(model) and worker.id not in out]

    def may_come_back(self, model: str | None, unfit: Collection[str], alone: bool) -> bool:
        """Whether a worker that is down could take, once it is up, a request that none can take now; so may one that is
        yet to come, where there is none at all. `alone`: the request cannot be served in two parts."""
        down = (worker for worker in self.workers.values() if worker.state == "down" and worker.id not in unfit)
        return not self.workers or any(w.serves(model) and (not alone or w.role == "both") for w in down)

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
        return model in self.names()

    def names(self) -> frozenset[str]:
        """All models that any worker, up or not, is known to serve."""
        if self._names is None:
            self._names = _NONE.union(*(worker.model_names for worker in self.workers.values()))
        return self._names

    @property
    def has_one_model(self) -> bool:
        """Whether the workers, up or not, are known to serve but one base model, under whatever names."""
        if self._one_model is None:
            known = self._all_bases()
            self._one_model = not known or _are_one(known)
        return self._one_model

    def may_serve(self, model: str) -> bool:
        """False only when there are workers, all have told their models, and none is `model`."""
        if not self.workers or self.knows(model):
            return True
        return any(not worker.models for worker in self.workers.values())

    def models(self) -> Mapping[str, tuple[Worker, Model]]:
        """All models served, by name, each with the first worker that has it; the same object until that changes."""
        if self._models is None:
            self._models = {}
            for worker in self.up:
                if not self._models.keys() >= worker.model_names:  # most often all have the same
                    for model in worker.models:
                        self._models.setdefault(model.id, (worker, model))
        return self._models

    def base_model(self, name: str | None) -> Model | None:
        """The base model behind `name`, an adapter's or its own; a request may leave out the name of the only one."""
        if self._bases is None:
            self._bases = _bases([model for _, model in self.models().values()])
        return self._bases.get(name)

    def base_of_down(self, name: str | None) -> Model | None:
        """As `base_model`, where the workers that serve `name` are down, as they described it last."""
        if self._down_bases is None:
            self._down_bases = _bases(list(self._models_of_down().values()))
        return self._down_bases.get(name) if name or self.has_one_model else None

    def _models_of_down(self) -> Mapping[str, Model]:
        if self._down is None:
            down = (worker for worker in self.workers.values() if worker.state == "down")
            self._down = {model.id: model for worker in down for model in worker.models}
        return self._down

    def prompt_name(self, name: str | None) -> str | None:
        """What stands for a request's model beside its text: the same for all names of a base model, which an engine
        caches together. An unknown name stands for itself."""
        base = self.base_model(name)
        if base is None:
            return name
        found = self._prompt_names.get(name)
        if found is None:
            adapter = self.lora_name(name)
            found = self._prompt_names[name] = self._first_name(base) if adapter is None else adapter
        return found

    def _first_name(self, base: Model) -> str:
        """The first of the base model's names on any worker, up or not: while a worker that has such a name is down,
        what was sent under it is still found."""
        return min(model.id for model in self._all_bases() if _are_one([base, model]))

    def _all_bases(self) -> list[Model]:
        """Those of all workers, up or not."""
        return [model for worker in self.workers.values() for model in worker.base_models]

    def context_lengths(self, base: str) -> ContextLengths:
        """Of the base model of that name. Workers may be started with different context lengths."""
        found = self._lengths.get(base)
        if found is None:
            serving = [(worker, model) for worker in self.up for model in worker.models if model.id == base]
            told = [(worker.id, model.max_model_len) for worker, model in serving if not worker.cuts_prompts]
            known = {worker: length for worker, length in told if length}
            most = max(known.values()) if known and len(known) == len(serving) else None
            found = self._lengths[base] = ContextLengths(known, min(known.values(), default=None), most)
        return found

    def lora_name(self, model: str | None) -> str | None:
        """The adapter's name if `model` is one: engines hash it into the blocks. Also while its workers are down."""
        if not model:
            return None
        served = self.models().get(model)
        found = served[1] if served else self._models_of_down().get(model)
        return found.adapter if found else None

    def namespace(self, model: str | None, cache_salt: str | None) -> Namespace:
        """That of a request's prompt. Most have neither an adapter nor a salt: theirs is not made anew."""
        adapter = self.lora_name(model)
        return PLAIN if adapter is None and cache_salt is None else Namespace(adapter, cache_salt)


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
