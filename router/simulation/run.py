"""A run of one policy, as a value that can be sent to another process, and a runner of many in parallel."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, get_args

import numpy as np

from router.ab.arrivals import check_ends
from router.ab.errors import RunError
from router.installed_policy import PolicyFault
from router.policies import known_policies, make_policy
from router.scheduling.admission import Admission, Objectives, SloAction
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import Cost, Policy, Situation
from router.settings import RouterMode, Settings, SettingsError
from router.simulation.arrival import Sample
from router.simulation.changes import Change, plan_changes
from router.simulation.figures import Figures, Goal, summarise
from router.simulation.fleet import FleetSettings, VirtualFleet
from router.simulation.source import Requests

AFFINITY = "affinity"
_MODES: frozenset[str] = frozenset(get_args(RouterMode)) - {"direct"}


class Affinity:
    """A baseline policy for simulations: the longest prefix wins; among equals, the fewest requests."""

    def cost(self, situation: Situation) -> Cost:
        missed = np.maximum(0, situation.prompt_tokens - situation.overlap_tokens)
        return Cost(missed * _DECIDES + situation.requests, max(1, situation.prompt_tokens) * _DECIDES)


_DECIDES = 1e6
"""More than the requests in flight at any rank, so that one token of overlap outweighs them."""


class Slo(NamedTuple):
    """Latency objectives, with the meaning of the router's settings `ttft_slo`, `tbt_slo` and so on."""

    ttft: float | None = None
    tbt: float | None = None
    action: SloAction = "reject"
    patience: float = 10.0


class Run(NamedTuple):
    """Everything that determines a run's result."""

    requests: Requests
    fleet: FleetSettings
    policy: str
    seed: int = 0
    rate: float = 1.0
    slo: Slo = Slo()
    changes: tuple[Change, ...] = ()
    goal: Goal = Goal()
    most_ttft: float | None = None
    """The run may stop as soon as its mean TTFT is certain to exceed this."""

    def figures(self) -> Figures:
        rows = self.requests.rows(self.seed, self.rate)
        _check_fits(max(row.input_length + row.output_length for row in rows), self.fleet)
        _check_blocks(rows[0].block_tokens, self.fleet.block_size)
        check_ends(rows[-1].timestamp / 1000)
        fleet = VirtualFleet(self.fleet, find_policy(self.policy), self.seed, self._admission())
        enough = None if self.most_ttft is None else _exceeds(self.most_ttft * len(rows))
        try:
            samples = fleet.run(rows, lambda fleet: plan_changes(fleet, self.changes), enough)
        except PolicyFault as fault:
            raise RunError(str(fault)) from fault
        arriving = (rows[-1].timestamp - rows[0].timestamp) / 1000
        store = self.fleet.store_tokens > 0
        prefilling = {number for number in range(self.fleet.workers) if self.fleet.role(number) != "decode"}
        return summarise(samples, fleet.token_gaps, prefilling, arriving, self.goal, store)

    def _admission(self) -> Admission:
        slo = self.slo
        return Admission(Objectives(slo.ttft, slo.tbt), slo.action, slo.patience)


def find_policy(name: str) -> Policy:
    """Finds a policy: a mode of the router, a cost of its mode `kv`, or `affinity`. Raises RunError otherwise."""
    if name == AFFINITY:
        return Cheapest(Affinity())
    try:
        settings = Settings(router_mode=name) if name in _MODES else Settings(kv_policy=name)  # type: ignore[arg-type]
        return make_policy(settings, strict=True)  # figures of another policy would be worse than none
    except SettingsError as error:
        if name in known_policies():  # policies of installed packages cannot be loaded here
            raise RunError(str(error)) from None
        there_are = ", ".join([*known_policies(), *sorted(_MODES), AFFINITY])
        raise RunError(f"there is no policy {name!r}; there are {there_are}") from None


def _exceeds(total: float) -> Callable[[Sequence[Sample]], bool]:
    """Returns a function that says whether the TTFTs of the samples so far add up to more than `total`."""
    seen, left = 0, total

    def exceeded(samples: Sequence[Sample]) -> bool:
        nonlocal seen, left
        left -= sum(sample.ttft or 0.0 for sample in samples[seen:])
        seen = len(samples)
        return left < 0

    return exceeded


def _check_fits(tokens: int, fleet: FleetSettings) -> None:
    if -(-tokens // fleet.block_size) > fleet.cache_tokens // fleet.block_size:
        blocks = f"{fleet.cache_tokens} in blocks of {fleet.block_size}"
        raise RunError(f"a request of {tokens} tokens does not fit a cache of {blocks}; see --cache-tokens")


def _check_blocks(tokens: int, block_size: int) -> None:
    if tokens % block_size and block_size % tokens:
        which = f"{tokens}, the tokens that one hash id stands for, or be a multiple of it"
        raise RunError(f"--block-size must divide {which}")


Runner: TypeAlias = Callable[[Iterable[Run]], Iterator[Figures]]
"""Executes runs and yields their results in the order given: lazily, or in parallel."""


@contextmanager
def runner(jobs: int) -> Iterator[Runner]:
    """Makes a runner that uses this process, or `jobs` others."""
    if jobs == 1:
        yield lambda runs: map(Run.figures, runs)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        try:
            yield lambda runs: _start(pool, list(runs))
        except BaseException:
            with _uninterrupted():
                for process in multiprocessing.active_children():  # else they finish their runs first, maybe for hours
                    process.terminate()
                pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """`timeout` sends its signal twice. The second one would break off waiting for the pool's thread, which Python then
    takes to have ended, and falls over at its exit."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(pool: ProcessPoolExecutor, runs: Sequence[Run]) -> Iterator[Figures]:
    """Starts the processes. A terminal sends Ctrl-C to them too, and each would print where it was: they inherit that
    it is blocked, and are ended from here. Another thread may get it meanwhile: it must not break off a start."""
    caught: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        started = [pool.submit(run.figures) for run in runs]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if caught and callable(handler):
        raise KeyboardInterrupt
    return _results(started)


def _results(started: Sequence[Future[Figures]]) -> Iterator[Figures]:
    try:
        for run in started:
            # It wakes now and then: of a Ctrl-C that another thread got, Python tells this one only when it is awake.
            while not wait([run], 0.5).done:
                pass
            yield run.result()
    finally:
        for run in started:
            run.cancel()


def _end_with_parent() -> None:
    """Else a process whose parent was killed waits for more runs for ever, and holds what it writes to open."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
