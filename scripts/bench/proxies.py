"""CPU per request and added latency: our router beside the peers that relay to the same workers, and beside Dynamo."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from .corpus import model_folder
from .latency import Added, added_latency
from .measure import Effort, cpu_per_request, idle_cpu
from .pairs import Ratio, ratio
from .routers import Field, dynamo, fleet, ours, sglang_router, vllm_router

WORKERS = 4


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
    missing: dict[str, str]
    commands: dict[str, str]


def nothing() -> Findings:
    return Findings([], [], {}, {}, {})


def round_robin(effort: Effort, found: Findings) -> None:
    with ExitStack() as stack:
        workers = stack.enter_context(fleet("workers", WORKERS))
        field = Field(stack)
        field.add("ours", ours("round-robin", workers))
        field.add("vllm-router", vllm_router("round_robin", workers))
        _measure(field, ("short", "long", "stream"), effort, found)


def cache_aware(effort: Effort, found: Findings) -> None:
    """The peers have workers of their own, which do the same: ours would hear of what theirs cache."""
    model = model_folder()
    with ExitStack() as stack:
        ours_workers = stack.enter_context(fleet("workers-ours", WORKERS, "--events", str(model)))
        workers = stack.enter_context(fleet("workers-peers", WORKERS, "--events", str(model)))
        field = Field(stack)
        field.add("ours", ours("kv", ours_workers, "--tokenizer", str(model)))
        field.add("vllm-router", vllm_router("cache_aware", workers))
        field.add("sglang-router", sglang_router("cache_aware", workers))
        _measure(field, ("short", "long", "chat", "stream"), effort, found)


def dynamo_kv(effort: Effort, found: Findings) -> None:
    """`events off` shows what of our cost is hearing from the workers what they hold."""
    model = model_folder()
    with ExitStack() as stack:
        workers = stack.enter_context(fleet("workers-ours", WORKERS, "--events", str(model)))
        field = Field(stack)
        field.add("ours", ours("kv", workers, "--tokenizer", str(model)))
        field.add("ours, events off", ours("kv", workers, "--tokenizer", str(model), "--no-kv-events"))
        for tokenizer in ("default", "fastokens"):
            field.add(f"dynamo, {tokenizer}", dynamo(model, WORKERS, tokenizer))
        _measure(field, ("short", "long", "chat", "stream"), effort, found)


def latency(effort: Effort, found: Findings) -> None:
    """Workers without caches: what they do themselves would drown the rest. Ours predicts instead of being told."""
    model = model_folder()
    with ExitStack() as stack:
        workers = stack.enter_context(fleet("workers", WORKERS))
        field = Field(stack)
        field.add("ours round-robin", ours("round-robin", workers))
        field.add("ours kv", ours("kv", workers, "--tokenizer", str(model)))
        field.add("vllm-router", vllm_router("round_robin", workers))
        field.add("vllm-router cache_aware", vllm_router("cache_aware", workers))
        field.add("sglang-router", sglang_router("cache_aware", workers))
        found.latency.extend(added_latency(field.running, workers[0], effort))
        _note(field, found)


def _measure(field: Field, workloads: Sequence[str], effort: Effort, found: Findings) -> None:
    _note(field, found)
    for router in field.running:
        found.idle[router.name] = idle_cpu(router)
    for workload in workloads:
        try:
            runs = cpu_per_request(field.running, workload, effort)
        except RuntimeError as error:
            found.missing[workload] = str(error)
            continue
        mine, *others = runs
        for peer in others:
            row = CpuRow(workload, mine, _median(runs[mine]), peer, _median(runs[peer]), ratio(runs[mine], runs[peer]))
            found.cpu.append(row)
            print(f"{workload}: {mine} {row.ours:.0f} µs, {peer} {row.peer:.0f} µs, ratio {row.ratio}", file=sys.stderr)


def _note(field: Field, found: Findings) -> None:
    found.missing.update(field.missing)
    found.commands.update({router.name: router.command for router in field.running})


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
