"""Each gauge says what the router's state is at the moment it is read."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest
from prometheus_client import generate_latest

from engines.description import EngineDescription
from indexer.cursor import View
from indexer.events import EventBatch, LoadReport, Stored, pack_hashes
from indexer.kv_indexer import KVIndexer
from indexer.types import Tier, WorkerRank
from publishers.local_plane import LocalPlane
from router.http.pool import Pool
from router.metrics.gauges import Gauges
from router.metrics.registry import Metrics
from router.scheduling.load import REPORT_LIFE, LoadBook
from router.workers.breaker import STATES
from router.workers.fleet import Fleet
from router.workers.spec import parse_worker
from router.workers.worker import Worker

A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)


class State:
    """Worker a with two ranks and worker b with one, which was not described yet."""

    def __init__(self) -> None:
        self.metrics, self.book, self.indexer, self.plane = Metrics(), LoadBook(), KVIndexer(), LocalPlane()
        self.now = 10.0
        self.a, self.b = (Worker(parse_worker(f"http://{n}:1,name={n}"), Pool(f"http://{n}:1", 1)) for n in "ab")
        self.a.description = EngineDescription("vllm", dp_size=2)
        self.fleet = Fleet([self.a, self.b])
        for rank in (A0, A1):
            self.book.watch(rank, 16)
            self.indexer.watch(rank)
        Gauges(self.fleet, self.book, self.indexer, self.plane, lambda: self.now).register(self.metrics)

    def read(self, name: str, **labels: str) -> float | None:
        generate_latest(self.metrics.registry)  # must not fail, whatever the state
        return self.metrics.registry.get_sample_value(name, labels)

    def of(self, name: str, rank: WorkerRank, **labels: str) -> float | None:
        return self.read(name, worker=rank.worker_id, dp_rank=str(rank.dp_rank), **labels)

    def views(self, rank: WorkerRank) -> dict[str, float | None]:
        return {view.value: self.of("router_index_view", rank, view=view.value) for view in View}


@pytest.fixture
def state() -> State:
    return State()


def batch(event_id: int, *hashes: int, tier: Tier = Tier.GPU) -> EventBatch:
    return EventBatch(*A0, 1, event_id, [Stored(tier, pack_hashes(hashes))])


def test_up(state: State) -> None:
    assert (state.read("router_worker_up", worker="a"), state.read("router_worker_up", worker="b")) == (0, 0)
    state.fleet.mark_up(state.a)
    assert (state.read("router_worker_up", worker="a"), state.read("router_worker_up", worker="b")) == (1, 0)


def test_exactly_one_state_is_one(state: State) -> None:
    def states() -> dict[str, float | None]:
        return {name: state.read("router_worker_state", worker="a", state=name) for name in ("up", "down", "draining")}

    assert states() == {"up": 0, "down": 1, "draining": 0}
    state.fleet.mark_up(state.a)
    assert states() == {"up": 1, "down": 0, "draining": 0}
    state.fleet.drain(state.a, True)
    assert states() == {"up": 0, "down": 0, "draining": 1}
    assert state.read("router_worker_up", worker="a") == 1
    state.fleet.remove(state.a)
    assert set(states().values()) == {None}


def test_exactly_one_view_is_one(state: State) -> None:
    assert state.views(A0) == {"exact": 0, "partial": 0, "recovering": 0, "blind": 1}
    state.indexer.on_batch(batch(0, 1))
    assert state.views(A0) == {"exact": 1, "partial": 0, "recovering": 0, "blind": 0}
    state.indexer.on_batch(batch(2, 3))
    assert state.views(A0) == {"exact": 0, "partial": 0, "recovering": 1, "blind": 0}
    state.indexer.on_batch(batch(1, 2))
    state.indexer.on_replay_end(A0)
    state.indexer.on_report(LoadReport(*A0, 1, 2, exact=False))
    assert state.views(A0) == {"exact": 0, "partial": 1, "recovering": 0, "blind": 0}
    for other in (A1, B0):
        assert state.views(other)["blind"] == 1


def test_blocks_and_batches(state: State) -> None:
    state.indexer.on_batch(batch(0, 1, 2, 3))
    state.indexer.on_batch(batch(1, 4, tier=Tier.CPU))
    state.indexer.on_batch(batch(0, 9))
    tiers = {tier: state.of("router_index_blocks", A0, tier=tier) for tier in ("gpu", "cpu", "disk")}
    assert tiers == {"gpu": 3, "cpu": 1, "disk": 0}
    assert state.of("router_index_blocks", B0, tier="gpu") == 0
    assert state.read("router_index_batches_total", fate="applied") == 2
    assert state.read("router_index_batches_total", fate="stale") == 1
    assert state.read("router_index_batches_total", fate="malformed") == 0  # there before the first


def test_memory(state: State) -> None:
    assert state.read("router_index_bytes") == state.indexer.nbytes
    assert state.read("router_index_evicted_blocks_total") == state.read("router_index_refused_blocks_total") == 0
    state.indexer = KVIndexer(max_bytes=1 << 20)
    for number in range(1_000):
        state.indexer.index.store(A0, Tier.GPU, range(100 * number, 100 * number + 100))
    readings, metrics = Gauges(state.fleet, state.book, state.indexer, state.plane, lambda: 0.0), Metrics()
    readings.register(metrics)
    assert metrics.registry.get_sample_value("router_index_bytes") == state.indexer.nbytes <= 1 << 20
    assert metrics.registry.get_sample_value("router_index_evicted_blocks_total") == state.indexer.evicted > 0
    assert metrics.registry.get_sample_value("router_index_refused_blocks_total") == state.indexer.refused


async def test_connected(state: State) -> None:
    assert state.read("router_event_plane_connected") == 0
    await state.plane.start()
    assert state.read("router_event_plane_connected") == 1


def test_loads_are_booked_and_foreign(state: State) -> None:
    reservation = state.book.reserve(A0, 60, 100)
    state.book.on_report(LoadReport(*A0, 1, -1, True, request_active_slots=3, kv_active_blocks=10), state.now)

    def loads() -> tuple[float | None, ...]:
        return tuple(
            state.of(f"router_load_{figure}", A0) for figure in ("requests", "prefill_tokens", "active_tokens")
        )

    assert loads() == (3, 60, 160)
    reservation.release()
    assert loads() == (2, 0, 60)
    state.now += REPORT_LIFE + 1
    assert loads() == (0, 0, 0)
    assert state.of("router_load_requests", B0) == 0


def test_what_was_not_reported_is_absent(state: State) -> None:
    assert state.of("router_load_age_seconds", A0) is None
    assert state.of("router_engine_load", A0, figure="kv_total_blocks") is None
    state.book.on_report(LoadReport(*A0, 1, -1, True, num_requests_waiting=0, gpu_cache_usage_perc=0.25), state.now)
    state.now += 4
    assert state.of("router_load_age_seconds", A0) == 4
    assert state.of("router_load_age_seconds", A1) is None
    figures = {figure: state.of("router_engine_load", A0, figure=figure) for figure in FIGURES}
    assert figures == dict.fromkeys(FIGURES) | {"num_requests_waiting": 0, "gpu_cache_usage_perc": 0.25}


FIGURES = (
    "num_requests_waiting",
    "gpu_cache_usage_perc",
    "gpu_prefix_cache_hit_rate",
    "request_active_slots",
    "request_total_slots",
    "kv_active_blocks",
    "kv_total_blocks",
)


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_of_a_report_is_passed_on(state: State, figure: str) -> None:
    state.book.on_report(msgspec.structs.replace(LoadReport(*A1, 1, -1, True), **{figure: 1}), state.now)
    assert state.of("router_engine_load", A1, figure=figure) == 1


def test_two_routers_in_one_process_count_apart() -> None:
    one, other = State(), State()
    one.metrics.tallies.in_flight += 1
    assert (one.read("router_requests_in_flight"), other.read("router_requests_in_flight")) == (1, 0)


async def test_workers_may_come_and_go_while_they_are_read(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    async def come_and_go() -> None:
        while True:
            state.fleet.remove(state.b)
            await asyncio.sleep(0)
            state.fleet.add(state.b)
            await asyncio.sleep(0)

    monkeypatch.setattr("router.metrics.exposition.PIECE", 1)
    others = asyncio.create_task(come_and_go())
    page = await state.metrics.page()
    others.cancel()
    assert b'router_worker_up{worker="a"} 0.0' in page


async def test_a_worker_that_changes_while_it_is_read_has_one_state(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def change() -> None:
        for number in itertools.count():
            state.a.up, state.a.draining = number % 3 == 0, number % 3 == 2
            state.a.breaker.state = STATES[number % 3]
            await asyncio.sleep(0)

    monkeypatch.setattr("router.metrics.exposition.PIECE", 1)
    changing = asyncio.create_task(change())
    page = (await state.metrics.page()).decode()
    changing.cancel()
    for name in ("state", "breaker"):
        told = [line for line in page.splitlines() if line.startswith(f"router_worker_{name}{{") and '"a"' in line]
        assert sorted(line.split()[-1] for line in told) == ["0.0", "0.0", "1.0"]


async def test_a_report_that_comes_while_workers_are_read_is_not_from_the_future(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def report() -> None:
        while True:
            state.now += 1
            for rank in (A0, A1):
                state.book.on_report(LoadReport(*rank, 1, -1, True, num_requests_waiting=0), state.now)
            await asyncio.sleep(0)

    monkeypatch.setattr("router.metrics.exposition.PIECE", 1)
    reporting = asyncio.create_task(report())
    await asyncio.sleep(0)
    page = (await state.metrics.page()).decode()
    reporting.cancel()
    ages = [line for line in page.splitlines() if line.startswith("router_load_age_seconds{")]
    assert [line.split()[-1] for line in ages] == ["0.0", "0.0"]
