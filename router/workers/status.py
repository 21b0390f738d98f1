"""The status of a worker, as /ready and the admin surface show it."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from indexer.cursor import View
from indexer.types import WorkerRank
from router.context import RouterContext
from router.events.index_audit import DriftStatus
from router.split.pairing import Counterparts, counterparts, why_unpaired
from router.workers.worker import LOOPS, State, Worker

PIECE: Final = 32
"""Workers looked at before other work gets its turn, after a few milliseconds where each has several ranks."""


class RankStatus(msgspec.Struct, kw_only=True):
    """One data-parallel rank of a worker."""

    dp_rank: int
    index: str
    """How well the index knows the rank: a `View` of `indexer.cursor`."""
    routed: str
    blocks: dict[str, int]
    """Blocks held, by tier."""
    drift: DriftStatus | None
    """How far the index differs from what the engine reports; null where there was nothing to compare."""
    requests: int
    load_age_seconds: float | None


class WorkerStatus(msgspec.Struct, kw_only=True):
    """One worker as it is now."""

    id: str
    url: str
    state: State
    up: bool
    """Whether its engine serves; it may be draining all the same."""
    trouble: str
    """Why it is down, for people."""
    breaker: str
    """State of its circuit breaker (`router.workers.breaker`)."""
    in_flight: int
    """Requests that it is serving."""
    engine: str
    models: list[str]
    block_size: int
    role: str
    connector: str | None
    problems: list[str]
    ranks: list[RankStatus]


async def worker_statuses(context: RouterContext) -> list[tuple[Worker, WorkerStatus]]:
    """Of all workers. Lets other work run meanwhile: of four thousand ranks it takes 50 ms."""
    others = counterparts(context.fleet.up)
    found = []
    for number, worker in enumerate(list(context.fleet.workers.values()), 1):
        found.append((worker, worker_status(context, worker, others)))
        if not number % PIECE:
            await asyncio.sleep(0)
    return found


def worker_status(context: RouterContext, worker: Worker, others: Counterparts) -> WorkerStatus:
    """`others`: of the workers that are up."""
    problems = list(worker.problems)
    missing = context.missing_events.problems.get(worker.id) if context.missing_events else None
    loops = LOOPS if worker.loops(context.clock()) else None
    unpaired = why_unpaired(worker, others) if worker.state == "up" else None
    return WorkerStatus(
        id=worker.id,
        url=worker.spec.url,
        state=worker.state,
        up=worker.up,
        trouble=worker.trouble,
        breaker=worker.breaker.state,
        in_flight=sum(context.scheduler.in_flight(rank) for rank in worker.ranks),
        engine=worker.engine,
        models=[model.id for model in worker.models],
        block_size=worker.block_size,
        role=worker.role,
        connector=worker.connector,
        problems=[*problems, *(problem for problem in (missing, loops, unpaired) if problem)],
        ranks=[_rank_status(context, rank) for rank in worker.ranks],
    )


_ROUTED = {View.BLIND: "by assumption", View.PARTIAL: "by events and assumption"}


def _rank_status(context: RouterContext, rank: WorkerRank) -> RankStatus:
    metrics = context.book.metrics(rank, context.clock())
    view = context.indexer.view(rank)
    return RankStatus(
        dp_rank=rank.dp_rank,
        index=view.value,
        routed="by assumption" if context.indexer.foreign(rank) else _ROUTED.get(view, "by events"),
        blocks={tier.name.lower(): held for tier, held in context.indexer.index.blocks_by_tier(rank).items()},
        drift=context.audit.status(rank) if context.audit else None,
        requests=metrics.load.requests if metrics else 0,
        load_age_seconds=round(metrics.age, 3) if metrics and metrics.age is not None else None,
    )
