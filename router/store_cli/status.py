"""`router store status`: whether the master is up, what it keeps and where, and whether it is named as expected."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engines.description import bases
from engines.store import (
    Counted,
    Health,
    Kept,
    Layout,
    Segment,
    SglangLayout,
    VllmLayout,
    survey,
    verify,
)
from router.store.shared_store import layout_of
from router.store.spec import StoreSpec
from router.store_cli.peers import Master
from router.store_cli.text import aligned, count, share, size
from router.workers.worker import ASSUMED_BLOCK_SIZE, Worker

MOST_KEYS = 1_000_000
"""That are listed without being told to: a master writes them all, at some 130 bytes each, before it goes on."""


class Named(msgspec.Struct, frozen=True):
    """Whether keys are named as the router would ask for them. None: there is nothing to tell it by."""

    model: str
    agrees: bool | None
    why: str


class Status(msgspec.Struct, frozen=True):
    store: str
    health: Health
    counted: Counted
    segments: list[Segment]
    kept: list[Kept] | None
    """None: there were too many keys to list."""
    named: list[Named]


async def status(master: Master, spec: StoreSpec, worker: Worker | None, *, list_all: bool) -> Status:
    """`worker`: described; None: only what `spec` states is compared."""
    health, counted = await master.health(), await master.counted()
    segments = await master.segments()
    held = counted.keys or 0
    if held > MOST_KEYS and not list_all:
        return Status(master.url, health, counted, segments, None, [])
    keys = await master.keys(held)
    kept = survey(keys)
    layouts = _of_worker(worker, spec) if worker else _stated(spec, kept)
    named = [Named(layout.model, *verify(keys, layout)) for layout in layouts]
    return Status(master.url, health, counted, segments, kept, named)


def _of_worker(worker: Worker, spec: StoreSpec) -> list[Layout]:
    layouts = (layout_of(worker, model, spec) for model in bases(worker.models))
    return [layout for layout in layouts if layout]


def _stated(spec: StoreSpec, kept: Sequence[Kept]) -> list[Layout]:
    """Of either engine, whichever has keys there."""
    if spec.model is None:
        return []
    size, tp = spec.block_size or ASSUMED_BLOCK_SIZE, spec.tp or 1
    if any(one.engine == "sglang" for one in kept) and not any(one.engine == "vllm" for one in kept):
        return [SglangLayout(model=spec.model, block_size=size, tp=tp, pp=spec.pp)]
    return [VllmLayout(model=spec.model, block_size=size, hash=spec.hash, tp=tp, pp=spec.pp)]


def show(found: Status) -> str:
    parts = [_head(found), _segments(found.segments), _kept(found), _named(found.named)]
    return "\n\n".join(part for part in parts if part)


def _head(found: Status) -> str:
    counted = found.counted
    rows = [("store", found.store), ("master", _master(found.health))]
    used, capacity = counted.used_bytes or 0, counted.capacity_bytes or 0
    where = f"{count(len(found.segments), 'segment')} of {count(counted.clients or 0, 'client')}"
    rows.append(("memory", f"{size(used)} of {size(capacity)} ({share(used, capacity)}) in {where}"))
    if counted.keys is not None:
        rows.append(("keys", f"{counted.keys:,}, {counted.pinned_keys or 0:,} pinned"))
    if counted.evicted_keys is not None:
        times = count(counted.evictions or 0, "time")
        evicted = f"{count(counted.evicted_keys, 'key')}, {size(counted.evicted_bytes or 0)}, {times}"
        rows.append(("evicted", f"{evicted}; {count(counted.failed_puts or 0, 'put')} found no room"))
    return aligned(rows)


def _master(health: Health) -> str:
    if health.role is None:
        return "up"
    ready = " and not ready" if health.ready is False else ""
    elsewhere = f"; the leader is {health.leader}" if health.leader else ""
    return f"up, {health.role}, {health.ha_state or 'in no known state'}{ready}{elsewhere}"


def _segments(segments: Sequence[Segment]) -> str:
    if not segments:
        return "No segment: nobody offers memory to the store."
    rows = [(one.name, one.endpoint, size(one.used), size(one.size), share(one.used, one.size)) for one in segments]
    return aligned([("SEGMENT", "ENDPOINT", "USED", "OF", "SHARE"), *rows])


def _kept(found: Status) -> str:
    if found.kept is None:
        return f"Too many keys to list ({found.counted.keys:,}): --list-all does it, and keeps the master busy."
    head = ("MODEL", "ENGINE", "KEYS", "BLOCKS", "KEYS A BLOCK", "RANKS", "DIGEST")
    return aligned([head, *map(_row, found.kept)]) if found.kept else "No keys."


def _row(one: Kept) -> tuple[str, ...]:
    if one.engine == "unknown":
        return "(other keys)", "-", f"{one.keys:,}", "-", "-", "-", "-"
    ranks = f"tp {one.tp} pp {one.pp}" + (f" groups {one.groups}" if one.groups > 1 else "")
    counts = f"{one.keys:,}", f"{one.blocks:,}", str(one.parts)
    return one.model + one.namespace, one.engine, *counts, ranks, f"{one.digest_bits} bits"


def _named(named: Sequence[Named]) -> str:
    """Loud where the router would find nothing, or not all."""
    loud = "MISMATCH, what the router asks for is not what is there: "
    return "\n".join((loud if one.agrees is False else "") + one.why for one in named)
