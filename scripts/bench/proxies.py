"""CPU per request and added latency: our router beside the peers that relay to the same workers, and beside Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from .corpus import model_folder
from .latency import Added, added_latency
from .measure import Effort, Sent, cpu_per_request, idle_cpu
from .pairs import Ratio, ratio
from .routers import Field, dynamo, fleet, ours, publishers, sglang_router, vllm_router
from .workloads import WORKLOADS

WORKERS = 4
APART, SILENT = ", publishers apart", ", told nothing"


class CpuRow(NamedTuple):
    """Microseconds of CPU per request, medians; the ratio ours/peer is of pairs."""

    workload: str
    ours_name: str
    ours: float
    peer_name: str
    peer: float
    ratio: Ratio


class Findings(NamedTuple):
    cpu: list[CpuRow]
    latency: list[Added]
    idle: dict[str, float]
    """Milliseconds of CPU a second without any request, by router."""
    missing: list[str]
    commands: dict[str, str]
    sent: Sent


def nothing() -> Findings:
    return Findings([], [], {}, [], {}, Sent())


def round_robin(effort: Effort, found: Findings) -> None:
    with ExitStack() as stack:
        workers = stack.enter_context(fleet("workers", WORKERS))
        field = Field(stack)
        field.add("ours", ours("round-robin", workers))
        field.add("vllm-router", vllm_router("round_robin", workers))
        _measure(field, ("short", "long", "stream"), effort, found)


def cache_aware(effort: Effort, found: Findings) -> None:
    """The peers have workers of their own, which do the same: ours would hear of what theirs cache. Told nothing, it
    has what they have."""
    model = model_folder()
    flags = ("--tokenizer", str(model))
    with ExitStack() as stack:
        ours_workers = stack.enter_context(fleet("workers-ours", WORKERS, "--events", str(model)))
        workers = stack.enter_context(fleet("workers-peers", WORKERS, "--events", str(model)))
        field = Field(stack)
        field.add("ours", ours("kv", ours_workers, *flags))
        field.add("ours told nothing", ours("kv", workers, *flags, "--no-kv-events", label=SILENT))
        field.add("vllm-router", vllm_router("cache_aware", workers))
        field.add("sglang-router", sglang_router("cache_aware", workers))
        _measure(field, ("short", "stream") if effort.quick else tuple(WORKLOADS), effort, found)


def dynamo_kv(effort: Effort, found: Findings) -> None:
    """Ours hears the engines itself, or publishers beside them as Dynamo has them, or, to see the cost, nothing."""
    model = model_folder()
    flags = ("--tokenizer", str(model))
    with ExitStack() as stack:
        workers = stack.enter_context(fleet("workers", WORKERS, "--events", str(model)))
        apart = stack.enter_context(fleet("workers-apart", WORKERS, "--events", str(model)))
        plane = stack.enter_context(publishers(apart))
        field = Field(stack)
        field.add("ours", ours("kv", workers, *flags))
        field.add("ours apart", ours("kv", apart, *flags, "--event-plane", plane, label=APART))
        if not effort.quick:
            silent = stack.enter_context(fleet("workers-silent", WORKERS))
            field.add("ours told nothing", ours("kv", silent, *flags, "--no-kv-events", label=SILENT))
            field.add("dynamo, fastokens", dynamo(model, WORKERS, "fastokens"))
        field.add("dynamo", dynamo(model, WORKERS, "default"))
        _measure(field, ("long", "chat") if effort.quick else tuple(WORKLOADS), effort, found)


def latency(effort: Effort, found: Findings) -> None:
    """Workers without caches: what they do themselves would drown the rest. Ours predicts instead of being told."""
    model = model_folder()
    with ExitStack() as stack:
        workers = stack.enter_context(fleet("workers", WORKERS))
        field = Field(stack)
        field.add("ours round-robin", ours("round-robin", workers))
        field.add("ours kv", ours("kv", workers, "--tokenizer", str(model)))
        field.add("vllm-router", vllm_router("round_robin", workers))
        if not effort.quick:
            field.add("vllm-router cache_aware", vllm_router("cache_aware", workers))
        field.add("sglang-router", sglang_router("cache_aware", workers))
        _note(field, found)
        found.latency.extend(added_latency(field.running, workers[0], effort, found.sent))


def _measure(field: Field, workloads: Sequence[str], effort: Effort, found: Findings) -> None:
    _note(field, found)
    for router in [] if effort.quick else field.running:
        found.idle[router.name] = idle_cpu(router)
    for workload in workloads:
        try:
            runs = cpu_per_request(field.running, workload, effort, found.sent)
        except RuntimeError as error:
            everybody = ", ".join(router.name for router in field.running)
            found.missing.append(f"{WORKLOADS[workload].title}, {everybody}: {error}")
            continue
        for mine in (name for name in runs if name.startswith("ours")):
            for peer in (name for name in runs if not name.startswith("ours")):
                pair = ratio(runs[mine], runs[peer])
                found.cpu.append(CpuRow(workload, mine, median(runs[mine]), peer, median(runs[peer]), pair))
                print(f"{workload}: {mine} {found.cpu[-1].ours:.0f} µs, {peer}: ratio {pair}", file=sys.stderr)


def _note(field: Field, found: Findings) -> None:
    found.missing.extend(f"{name}: {why}" for name, why in field.missing.items())
    found.commands.update({router.name: router.command for router in field.running})
