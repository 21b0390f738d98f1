"""One arm of a repeat: a fresh fleet, what chooses in front of it, and a replay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from rich.console import Console

from router.ab import children, client, workers
from router.ab.client import Address
from router.ab.errors import RunError
from router.ab.machine import Cost, Meter
from router.ab.plan import Plan
from router.ab.progress import progress
from router.ab.replay import Pace, Prompts, Send, replay
from router.ab.statistics import Record
from router.ab.trace import Row, reuse
from router.security.worker_access import WorkerAccess

from . import service
from .asking import Asking
from .options import DYNAMO, OURS
from .service import Tally


class Measured(msgspec.Struct, frozen=True):
    """`tally`: only of the selection service."""

    arm: str
    records: tuple[Record, ...]
    cost: Cost
    tally: Tally | None = None


async def measure(plan: Plan, rows: list[Row], arm: str, label: str, console: Console) -> Measured:
    """From empty caches to all answers. Raises RunError."""
    meter = Meter()
    async with children.fleet(plan.fleet_flags) as urls:
        prompts = Prompts(await workers.served_model(urls, WorkerAccess()), plan.seed)
        async with _sender(plan, arm, urls, prompts.model) as (send, tally):
            with progress(console, label, len(rows)) as advance:
                records = await replay(rows, [send], Pace(plan.rate, plan.speedup), prompts, advance)
    if tally is not None:
        check_credit(tally, rows)
    return Measured(arm, tuple(records), meter.read(sum(one.chunks for one in records)), tally)


@asynccontextmanager
async def _sender(plan: Plan, arm: str, urls: Sequence[str], model: str) -> AsyncIterator[tuple[Send, Tally | None]]:
    if arm == DYNAMO:
        async with service.started(urls, model) as found:
            yield Asking(found, plan.timeout).send, found.tally
        return
    flags = ["--seed", str(plan.seed), "--log-level", "warning", *(plan.router_args if arm == OURS else ())]
    async with children.router("kv" if arm == OURS else arm, urls, flags) as url:
        yield partial(client.send, Address.parse(url), timeout=plan.timeout), None


def check_credit(tally: Tally, rows: Sequence[Row]) -> None:
    """Raises RunError when the service took nothing for cached though prompts repeat, or when calls failed."""
    if reuse(rows) and not tally.cached_tokens:
        raise RunError(
            "the selection service never took a token for cached, though prompts repeat: its figures are void"
        )
    if tally.failures:
        raise RunError(f"{len(tally.failures)} calls to the selection service failed; the first: {tally.failures[0]}")
