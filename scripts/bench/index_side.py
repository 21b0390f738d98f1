"""One side of the index benchmark, in a process of its own; prints one line of JSON.

Runs under either environment's Python, hence only the standard library and the index under test. Both sides are fed the
same blocks: 64-bit hashes in lists of Python integers for ours, the JSON events that its binding takes for Dynamo's.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

BLOCKS = 750
"""A prompt of 12,000 tokens in blocks of 16."""


class Index(Protocol):
    """`pack` makes what `store` takes and `ask` what `overlaps` takes, so that making it is not timed."""

    def pack(self, hashes: list[int]) -> Any: ...
    def ask(self, hashes: list[int]) -> Any: ...
    def store(self, worker: int, packed: Any) -> None: ...
    def overlaps(self, asked: Any) -> Any:
        """Every worker's overlap, in the form in which a cost function reads it."""
        ...

    def mapping(self, hashes: list[int]) -> dict[Any, Any]:
        """The overlap of each worker that holds a part of the prompt."""
        ...


class Ours:
    def __init__(self) -> None:
        types = importlib.import_module("indexer.types")
        self._index = importlib.import_module("indexer.prefix_index").PrefixIndex()
        self._gpu = types.Tier.GPU
        self._ranks = [types.WorkerRank(f"worker-{number}", 0) for number in range(1024)]
        self._all = types.RankSet(self._ranks)

    def pack(self, hashes: list[int]) -> Any:
        """As the router holds the hashes of an event that it has decoded."""
        events = importlib.import_module("indexer.events")
        return events.unpack_hashes(events.pack_hashes(hashes))

    ask = pack  # a request's hashes are in the same form

    def store(self, worker: int, packed: Any) -> None:
        self._index.store(self._ranks[worker], self._gpu, packed)

    def overlaps(self, asked: Any) -> Any:
        """An array by rank: what the router's scheduler reads."""
        return self._index.find_matches(asked).blocks_of(self._all)

    def mapping(self, hashes: list[int]) -> dict[Any, Any]:
        return dict(self._index.find_matches(hashes))


class Dynamo:
    """Local and chained block hashes are the same numbers here: the tree does not compare one with the other."""

    def __init__(self) -> None:
        self._tree = importlib.import_module("dynamo.llm").RadixTree()

    def pack(self, hashes: list[int]) -> Any:
        blocks = [{"block_hash": name, "tokens_hash": name} for name in hashes]
        event = {"event_id": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
        return json.dumps(event, separators=(",", ":")).encode()

    def store(self, worker: int, packed: Any) -> None:
        self._tree.apply_event(worker, packed)

    def ask(self, hashes: list[int]) -> Any:
        """A list is all that the binding takes."""
        return hashes

    def overlaps(self, asked: Any) -> Any:
        """A dictionary by worker: all that the binding gives."""
        return self._tree.find_matches(asked).scores

    def mapping(self, hashes: list[int]) -> dict[Any, Any]:
        return dict(self._tree.find_matches(hashes).scores)


def prompt(draw: random.Random, blocks: int = BLOCKS) -> list[int]:
    return [draw.getrandbits(64) for _ in range(blocks)]


def find(index: Index, workers: int, calls: int) -> dict[str, float]:
    """Median microseconds: worker i holds (i + 1)/workers of the prompt; then all of it everywhere; then a miss."""
    draw = random.Random(1)
    staggered, everywhere, unknown = prompt(draw), prompt(draw), prompt(draw)
    whole = index.pack(everywhere)
    for worker in range(workers):
        index.store(worker, index.pack(staggered[: (worker + 1) * BLOCKS // workers]))
        index.store(worker, whole)
    # With more workers than blocks the first hold nothing.
    holding = sum((worker + 1) * BLOCKS // workers > 0 for worker in range(workers))
    for hashes, expected in ((staggered, holding), (everywhere, workers), (unknown, 0)):
        if (holders := len(index.mapping(hashes))) != expected:
            raise AssertionError(f"{holders} workers found, {expected} expected")
    cases = {"staggered": staggered, "full": everywhere, "miss": unknown}
    found = {name: _median(index.overlaps, index.ask(hashes), calls) for name, hashes in cases.items()}
    return {**found, "mapping": _median(index.mapping, staggered, calls)}


def _median(call: Callable[[Any], object], argument: object, calls: int) -> float:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call(argument)
        times.append(time.perf_counter() - began)
    return sorted(times)[calls // 2] * 1e6


def memory(index: Index, entries: int, holders: int) -> dict[str, float]:
    """Resident bytes per (worker, block): prompts of 12k tokens, each held by `holders` of 64 workers."""
    draw = random.Random(2)
    gc.collect()
    before = _resident()
    for number in range(entries // BLOCKS // holders):
        packed = index.pack(prompt(draw))
        for copy in range(holders):
            index.store((number + copy) % 64, packed)
    index.mapping(prompt(draw))  # what is applied in the background is done before it is answered
    gc.collect()
    return {"bytes": (_resident() - before) / (entries // BLOCKS // holders * BLOCKS * holders)}


def events(index: Index, count: int) -> dict[str, float]:
    """Blocks stored a second, of prompts on 64 workers, each stored once; by wall clock and by CPU time of the process.

    `decoded` leaves out the CPU time of reading events, where reading is part of applying them: that of the same events
    without their last byte, which are refused after all else was read. Both are taken in turns of ten events.
    """
    draw = random.Random(3)
    wall = spent = parse = 0.0
    for first in range(0, count, 10):
        packed = [index.pack(prompt(draw)) for _ in range(10)]
        if isinstance(packed[0], bytes):
            parse += _timed(_read_only, index, packed)[1]
        took, cpu = _timed(_apply, index, packed, first)
        wall, spent = wall + took, spent + cpu
    blocks = count * BLOCKS
    return {"wall": blocks / wall, "cpu": blocks / spent, "decoded": blocks / max(0.05 * spent, spent - parse)}


def _apply(index: Index, packed: list[Any], first: int) -> None:
    for number, event in enumerate(packed, first):
        index.store(number % 64, event)
    index.mapping([1, 2, 3])


def _read_only(index: Index, packed: list[bytes]) -> None:
    for event in packed:
        try:
            index.store(0, event[:-1])
        except ValueError:
            continue
        raise AssertionError("an event without its end was taken")


def _timed(call: Callable[..., None], *args: object) -> tuple[float, float]:
    """Seconds by wall clock and of this process's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    call(*args)
    return time.perf_counter() - wall, time.process_time() - cpu


def _warm_up(index: Index) -> None:
    """What starts or is compiled at the first use belongs to the start of a router, not to its work."""
    few = prompt(random.Random(0), 4)
    index.store(0, index.pack(few))
    index.overlaps(index.ask(few))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.index_side")
    parser.add_argument("side", choices=["ours", "dynamo"])
    parser.add_argument("what", choices=["find", "memory", "events"])
    parser.add_argument("numbers", type=int, nargs="+", help="arguments of `what`")
    args = parser.parse_args()
    index: Index = Ours() if args.side == "ours" else Dynamo()
    _warm_up(index)
    what: dict[str, Callable[..., dict[str, float]]] = {"find": find, "memory": memory, "events": events}
    print(json.dumps(what[args.what](index, *args.numbers)))


if __name__ == "__main__":
    main()
