"""Which prefill workers can hand over to which decode workers, and why a worker has none to work with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engines.disaggregation import CONNECTORS
from router.scheduling.candidates import Candidates, Split
from router.workers.worker import Worker

_Kind = tuple[str | None, str, frozenset[str], int]
"""Connector, engine, models and block size: workers that have all of these in common can use each other's KV."""


class Counterparts(NamedTuple):
    """Of all workers that are up, the kinds of those that prefill for others, and of those that can take over."""

    prefills: frozenset[_Kind]
    decodes: frozenset[_Kind]


class _Targets(NamedTuple):
    """The ranks that can take over from prefill workers of one kind, and the host of each."""

    ranks: Candidates
    hosts: npt.NDArray[np.str_]


def make_split(able: Sequence[Worker]) -> Split | None:
    """`able`: workers that are up and serve the same model. None when there is no pair among them."""
    if all(worker.role != "prefill" for worker in able):
        return None
    kinds = {worker.id: _kind(worker) for worker in able if worker.connector is not None}
    targets = _targets([worker for worker in able if worker.role != "prefill" and worker.id in kinds], kinds)
    prefills = [
        worker for worker in able if worker.role == "prefill" and kinds.get(worker.id) in targets and not lack(worker)
    ]
    return _split(prefills, targets, kinds) if prefills else None


def _targets(decodes: Sequence[Worker], kinds: Mapping[str, _Kind]) -> dict[_Kind, _Targets]:
    """By kind; `kinds`: by worker."""
    alike: dict[_Kind, list[Worker]] = {}
    for worker in decodes:
        alike.setdefault(kinds[worker.id], []).append(worker)
    ranks = {kind: ranks_of(workers) for kind, workers in alike.items()}
    hosts = {worker.id: worker.host for worker in decodes}
    return {kind: _Targets(of, np.array([hosts[rank.worker_id] for rank in of.ranks])) for kind, of in ranks.items()}


def _split(prefills: Sequence[Worker], targets: Mapping[_Kind, _Targets], kinds: Mapping[str, _Kind]) -> Split:
    """All `prefills` have targets."""
    candidates = ranks_of(prefills)
    workers = {worker.id: worker for worker in prefills}
    sources = [workers[rank.worker_id] for rank in candidates.ranks]  # a worker with several ranks comes several times
    places = [(kinds[source.id], source.host) for source in sources]
    near = {(kind, host): targets[kind].hosts == host for kind, host in set(places)}
    names = [source.connector or "" for source in sources]
    return Split(
        candidates,
        tuple(targets[kind].ranks for kind, _ in places),
        tuple(near[place] for place in places),
        tuple(CONNECTORS[name].pushes for name in names),
        frozenset(names),
    )


def ranks_of(workers: Iterable[Worker], split: Split | None = None) -> Candidates:
    """All ranks of `workers` as candidates; `split` as of `Candidates`."""
    found = list(workers)
    without_store = {rank for worker in found if not worker.uses_store for rank in worker.ranks}
    return Candidates(
        sorted((rank, worker.block_size) for worker in found for rank in worker.ranks), split, without_store
    )


def lack(worker: Worker) -> str | None:
    """What is not known yet of a prefill worker and must be before it can hand over; None: nothing."""
    connector = CONNECTORS.get(worker.connector or "")
    if connector is None:
        return "how its KV is moved is not known: state it with --worker URL,connector=NAME"
    return next((why for rank in worker.ranks if (why := connector.lacks(worker.prefiller(rank.dp_rank)))), None)


def counterparts(up: Iterable[Worker]) -> Counterparts:
    """For `why_unpaired`, once for all workers that are asked about."""
    workers = list(up)
    return Counterparts(
        frozenset(_kind(worker) for worker in workers if worker.role == "prefill"),
        frozenset(_kind(worker) for worker in workers if worker.role != "prefill" and worker.connector),
    )


def why_unpaired(worker: Worker, others: Counterparts) -> str | None:
    """Why a worker that is up gets no requests for want of a counterpart; None: it gets some."""
    if worker.role == "both":
        return None
    missing = lack(worker) if worker.role == "prefill" or worker.connector is None else None
    if missing:
        return missing
    decodes = worker.role == "decode"
    kinds = others.prefills if decodes else others.decodes
    other = "prefill worker" if decodes else "worker that decodes, and whose connector is known,"
    if not kinds:
        return f"it gets no requests: no {other} is up"
    if _kind(worker) not in kinds:
        return f"it gets no requests: no {other} that is up has its model, engine, connector and block size"
    return None


def _kind(worker: Worker) -> _Kind:
    models = frozenset(model.id for model in worker.base_models)
    return worker.connector, worker.engine, models, worker.block_size
