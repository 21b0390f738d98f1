"""Runs a target on inputs made by a seed: the same seed, the same inputs, on any machine."""

from __future__ import annotations

import logging
import signal
import time
import traceback
from collections.abc import Callable, Hashable
from random import Random
from types import FrameType
from typing import NamedTuple

from tests.fuzz.mutate import mutate
from tests.fuzz.target import Target

HANG = 5.0
"""Seconds of processor time that one input may take: thousands of times what any does."""
FIRST = 120.0
"""The same for the seeds, during which code is compiled (`indexer.jit`) that was not before."""
_KEPT = 2000
"""Inputs that are kept; beyond, each new one takes the place of another."""
_FRESH = 0.1
"""Share of inputs made from a seed rather than from what was kept."""


class Failure(NamedTuple):
    """`where`: the kind of error and the line that raised it; the same for the same fault."""

    target: str
    seed: str
    execution: int
    where: str
    report: str
    data: bytes
    smallest: bytes


class Result(NamedTuple):
    """`kept`: inputs, the seeds included, with outcomes of their own."""

    executions: int
    kept: int
    seconds: float
    failure: Failure | None = None


class Hang(BaseException):
    """No Exception, so that nobody takes it for a broken input."""


def fuzz(target: Target, seed: str, executions: int, seconds: float = float("inf")) -> Result:
    """Until so many `executions`, so many `seconds` of the clock, or a failure. Only in a process's main thread."""
    draw, seeds = Random(f"{target.name} {seed}"), list(target.seeds())
    began = time.monotonic()
    kept, seen = list(seeds), set[Hashable]()
    before = signal.signal(signal.SIGVTALRM, _hang)
    logging.disable()  # each broken input would be told of
    try:
        for number in range(executions):
            data = _next(draw, target, seeds, kept, number)
            if error := failing(target, data, seen, kept, HANG if number >= len(seeds) else FIRST):
                failure = _failure(target, seed, number, error, data)
                return Result(number + 1, len(kept), time.monotonic() - began, failure)
            if number % 64 == 0 and time.monotonic() - began > seconds:
                return Result(number + 1, len(kept), time.monotonic() - began)
        return Result(executions, len(kept), time.monotonic() - began)
    finally:
        logging.disable(logging.NOTSET)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _next(draw: Random, target: Target, seeds: list[bytes], kept: list[bytes], number: int) -> bytes:
    """The seeds as they are come first."""
    if number < len(seeds):
        return seeds[number]
    source = seeds if draw.random() < _FRESH else kept
    data, other = source[int(draw.random() * len(source))], kept[int(draw.random() * len(kept))]
    data = mutate(draw, data, other, target)
    if len(kept) > _KEPT:
        del kept[len(seeds) + int(draw.random() * (len(kept) - len(seeds)))]
    return data


def failing(
    target: Target,
    data: bytes,
    seen: set[Hashable] | None = None,
    kept: list[bytes] | None = None,
    patience: float = FIRST,
) -> BaseException | None:
    """What `data` raises. A new outcome goes into `seen`, and its input to `kept`. `patience` in seconds."""
    signal.setitimer(signal.ITIMER_VIRTUAL, patience)
    try:
        outcome = target.run(data)
    except (Exception, Hang) as error:  # noqa: BLE001 -- whatever it is, it is a finding
        return error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # what runs later in this process must not be ended by it
    if seen is not None and kept is not None and outcome not in seen:
        seen.add(outcome)
        kept.append(data)
    return None


def minimise(data: bytes, still: Callable[[bytes], bool], seconds: float = 20.0) -> bytes:
    """A shorter input for which `still` holds, made by leaving parts out, for so many seconds at most."""
    size, end = len(data), time.monotonic() + seconds
    while size and time.monotonic() < end:
        at = 0
        while at < len(data) and time.monotonic() < end:
            smaller = data[:at] + data[at + size :]
            if still(smaller):
                data = smaller
            else:
                at += size
        size //= 2
    return data


def _failure(target: Target, seed: str, number: int, error: BaseException, data: bytes) -> Failure:
    where, report = _where(error), "".join(traceback.format_exception(error, limit=-6))
    smallest = minimise(data, lambda smaller: _where(failing(target, smaller, patience=HANG)) == where)
    return Failure(target.name, seed, number, where, report, data, smallest)


def _where(error: BaseException | None) -> str:
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}"


def _hang(_number: int, _frame: FrameType | None) -> None:
    raise Hang("still running")
