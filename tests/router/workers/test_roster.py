"""Workers that come and go: nothing of them is left, and what is stated of them is taken over."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from engines.description import EngineDescription, Model
from indexer.events import EventBatch, Stored, pack_hashes
from indexer.kv_indexer import KVIndexer, hash_prompt
from indexer.types import PLAIN, Tier, WorkerRank
from publishers.local_plane import LocalPlane
from publishers.publisher import EnginePublisher
from router.http.pool import Pool
from router.metrics.registry import Metrics
from router.scheduling.balance import LeastLoaded
from router.scheduling.latency import Prefill
from router.scheduling.load import LoadBook
from router.scheduling.scheduler import Scheduler
from router.settings import Settings
from router.workers import roster
from router.workers.fleet import Fleet
from router.workers.resources import WorkerResources, _Followed
from router.workers.roster import Conflict, Roster
from router.workers.spec import WorkerSpec, parse_worker
from router.workers.watch import WorkerWatch
from router.workers.worker import Worker
from tests.fakes.waiting import until


class FakeWatch:
    """Nobody is asked: a worker comes up when the test says so."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.stale = False
        self.first_check = asyncio.Event()
        self.ended = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


class State:
    def __init__(self, session: aiohttp.ClientSession | None = None, plane: str = "nats://nowhere:1") -> None:
        self.now = 0.0
        self.fleet, self.metrics, self.plane = Fleet([]), Metrics(), LocalPlane()
        self.indexer = KVIndexer(100.0, 1 << 20)
        self.scheduler = Scheduler(LeastLoaded(), LoadBook(), random.Random(0))
        self.watches: list[FakeWatch] = []
        self.resources = WorkerResources(
            Settings(event_plane=plane),
            self.scheduler,
            self.indexer,
            self.metrics,
            self.plane,
            cast("aiohttp.ClientSession", session),
            [],
        )
        self.roster = Roster(
            self.fleet,
            self.scheduler,
            self.resources,
            lambda spec: Worker(spec, Pool(spec.url, 1.0)),
            self._watch,
            lambda: self.now,
            self._handed_over,
        )
        self.handed_over = True
        self.failing: Exception | None = None
        self.asked = 0
        self.answering = asyncio.Event()
        """Whether the store answers."""
        self.answering.set()

    async def _handed_over(self, worker: Worker) -> bool:
        self.asked += 1
        await self.answering.wait()
        if self.failing:
            raise self.failing
        return self.handed_over

    def _watch(self, worker: Worker) -> WorkerWatch:
        self.watches.append(FakeWatch(worker))
        return cast("WorkerWatch", self.watches[-1])

    async def up(self, worker: Worker, ranks: int = 1) -> None:
        models = (Model("m"),)
        worker.description = EngineDescription("vllm", None, models, dp_size=ranks, block_size=16, total_blocks=8)
        await self.resources.set_up(worker)
        self.fleet.mark_up(worker)

    async def gone(self, name: str) -> None:
        await until(lambda: name not in self.fleet.workers)

    def take(self, *texts: str) -> list[str]:
        return self.roster.take([parse_worker(text) for text in texts], 60.0)

    @property
    def names(self) -> list[str]:
        return list(self.fleet.workers)


@pytest.fixture
async def state() -> AsyncIterator[State]:
    made = State()
    yield made
    await made.roster.close()


def spec(name: str, keys: str = "", host: str = "") -> WorkerSpec:
    return parse_worker(f"http://{host or name}:1,name={name}{keys}")


# -- joining and leaving


@pytest.mark.parametrize("end", ["handed over", "too late", "another deadline"])
async def test_a_worker_stays_until_others_can_have_what_it_computed_but_not_for_long(
    state: State, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "_HAND_OVER_POLL", 0.0)
    state.handed_over = False
    state.take("http://a:1,name=a")
    state.roster.leave(state.fleet.workers["a"], 60.0)
    await until(lambda: state.asked > 3)
    assert state.names == ["a"]
    if end == "handed over":
        state.handed_over = True
    elif end == "too late":
        state.now += roster._HAND_OVER + 1
    else:
        state.roster.leave(state.fleet.workers["a"], 0.0)
    await state.gone("a")


async def test_a_store_that_answers_slowly_does_not_keep_a_worker(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "_HAND_OVER", 0.01)
    state.answering.clear()
    state.take("http://a:1,name=a")
    state.roster.leave(state.fleet.workers["a"], 60.0)
    await state.gone("a")


async def test_a_worker_leaves_whatever_goes_wrong_in_handing_over(
    state: State, caplog: pytest.LogCaptureFixture
) -> None:
    state.failing = ValueError("of whatever kind")
    state.take("http://a:1,name=a")
    state.roster.leave(state.fleet.workers["a"], 60.0)
    await state.gone("a")
    assert "could not be handed over" in caplog.text


async def test_nothing_is_left_of_workers_that_have_left(state: State) -> None:
    """Each computes, is learned from, holds blocks, leaves with something still in flight; sizes must not follow."""
    sizes: list[list[int]] = []
    for round_ in range(200):
        worker = state.roster.join(spec(f"w{round_}"))
        await state.up(worker, ranks=2)
        for rank in worker.ranks:
            await use(state, rank)
        state.metrics.tallies.worker(worker.id).retries += 1
        left = state.scheduler.book.reserve(worker.ranks[0], 10, 10)
        state.roster.leave(worker, 0.0)
        await asyncio.sleep(0)  # it is past its deadline
        left.release()
        await state.gone(worker.id)
        sizes.append(size_of(state))
    assert state.names == []
    assert max(sizes[100:]) <= max(sizes[:20])
    assert state.metrics.tallies._workers == {}
    assert state.scheduler.book.get_metrics(0.0) == {}
    assert not state.scheduler.handing_over
    assert not state.scheduler.store_loads.tokens
    assert all(watch.ended for watch in state.watches)
    assert not state.roster._leaving
    assert not state.roster._watched
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_fleet_that_leaves_is_not_looked_at_more_often_than_a_few_workers(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookings = []
    for number in range(100):
        worker = state.roster.join(spec(f"w{number}"))
        await state.up(worker)
        bookings.append(state.scheduler.book.reserve(worker.ranks[0], 10, 10))
    pauses = recorded_pauses(monkeypatch)
    for worker in state.fleet.workers.values():
        state.roster.leave(worker, 60.0)
    await until(lambda: len(pauses) >= 100)
    assert 100 / min(pauses) <= roster._MOST_POLLS
    state.handed_over = False
    for booking in bookings:
        booking.release()
    await until(lambda: state.asked >= 100)
    pauses.clear()
    await until(lambda: len(pauses) >= 100)
    assert 100 / min(pauses) <= roster._MOST_HAND_OVERS


async def test_a_fleet_that_leaves_waits_for_a_slow_store_no_longer_than_one_worker(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handed_over(_: Worker) -> bool:
        state.now += 0.9 * roster._HAND_OVER
        return False

    monkeypatch.setattr(roster, "_MOST_HAND_OVERS", 1e-3)  # as with many more workers
    monkeypatch.setattr(state.roster, "_handed_over", handed_over)
    state.take("http://a:1,name=a")
    pauses = recorded_pauses(monkeypatch)
    state.roster.leave(state.fleet.workers["a"], 60.0)
    await state.gone("a")
    assert pauses == [pytest.approx(0.1 * roster._HAND_OVER)]


def recorded_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Fills up with the seconds that anybody means to wait from now on; nobody does."""
    pauses, wait = list[float](), asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds >= roster._POLL:
            pauses.append(seconds)
        await wait(0)

    monkeypatch.setattr("asyncio.sleep", sleep)
    return pauses


async def use(state: State, rank: WorkerRank) -> None:
    scheduler = state.scheduler
    prompt = hash_prompt(range(64), [16], PLAIN)
    state.indexer.predict(rank, prompt.chain(16), state.now)
    state.indexer.index.store(rank, Tier.CPU, list(range(1, 50)))
    decision = scheduler.select(state.fleet.candidates("m"), 64, state.indexer.find_matches(prompt), state.now)
    booking = scheduler.reserve(decision, state.now)
    booking.first_token(state.now + 0.1)
    booking.generated(3, state.now + 0.2)
    booking.release(state.now + 0.3)
    scheduler.latency.observe_prefill(rank, Prefill(10, 10), 0.1, state.now)
    scheduler.latency.observe_steps(rank, 3, 0.1, state.now)


def size_of(state: State) -> list[int]:
    """Of all that is kept by rank or by place."""
    book, backlog, latency, indexer = (
        state.scheduler.book,
        state.scheduler.backlog,
        state.scheduler.latency,
        state.indexer,
    )
    places = [kept._places for kept in (book, backlog, latency)]
    return [
        *(len(each._places) + each._high for each in places),
        *(len(each) for each in (book._retired, book._block_sizes, book._reports, backlog._lines, backlog._progress)),
        book._table.shape[1],
        backlog._tables.shape[2],
        *(len(each._sums) + len(each._known) for each in (latency._prefill_factors, latency._step_factors)),
        len(latency._latest) + len(latency._steps),
        *(len(each) for each in (indexer._cursors, indexer._assumed, indexer.index._slots)),
        *(len(each._caches) + each._lives.rows for each in (indexer._assumed, indexer._guessed)),
        indexer.index._live_slots.shape[1],
        len(state.resources._ranks) + len(state.resources._followed),
    ]


async def test_publishers_end_with_their_workers() -> None:
    async with aiohttp.ClientSession() as session:
        state = State(session, plane="local")
        await state.plane.start()
        before = asyncio.all_tasks()
        for _ in range(3):
            worker = state.roster.join(spec("a", ",events=tcp://127.0.0.1:1"))
            await state.up(worker)
            (followed,) = state.resources._followed.values()
            await until(partial(lambda publisher: publisher.ranks, followed.publisher))
            state.roster.leave(worker, 0.0)
            await state.gone("a")
            assert state.resources._followed == {}
        await until(lambda: asyncio.all_tasks() == before)
        await state.roster.close()
        await state.plane.close()


@pytest.mark.parametrize(
    "other", [{"block_size": 32}, {"dp_size": 2}, {"total_blocks": 9}, {"max_running": 3}, {"max_loras": 2}]
)
async def test_a_worker_that_was_away_is_followed_on_unless_its_events_are_others(other: dict[str, int]) -> None:
    """A publisher that begins anew knows only what the engine can replay."""
    async with aiohttp.ClientSession() as session:
        state = State(session, plane="local")
        await state.plane.start()
        worker = state.roster.join(spec("a", ",events=tcp://127.0.0.1:1"))
        await state.up(worker)
        publisher = state.resources._followed["a"].publisher
        assert worker.description is not None
        state.roster.restate(worker, spec("a", ",events=tcp://127.0.0.1:1,role=prefill"))
        worker.description = msgspec.structs.replace(worker.description, models=(Model("m"), Model("b", parent="m")))
        looked_again: list[bool] = []
        publisher.look_again = lambda: looked_again.append(True)  # type: ignore[method-assign]
        await state.resources.set_up(worker)
        assert state.resources._followed["a"].publisher is publisher
        assert looked_again == [True]
        worker.description = msgspec.structs.replace(worker.description, **other)
        await state.resources.set_up(worker)
        assert state.resources._followed["a"].publisher is not publisher
        await state.roster.close()
        await state.plane.close()


async def test_the_events_of_a_worker_that_publishes_none_any_more_are_not_waited_for() -> None:
    """Nor is what they told of the engine before believed."""
    async with aiohttp.ClientSession() as session:
        state = State(session, plane="local")
        await state.plane.start()
        worker = state.roster.join(spec("a", ",events=tcp://127.0.0.1:1"))
        await state.up(worker)
        (rank,) = worker.ranks
        state.indexer.on_batch(EventBatch("a", 0, 1, 0, [Stored(Tier.GPU, pack_hashes([7]))]))
        assert (state.indexer.watches(rank), state.indexer.index.blocks(rank, Tier.GPU)) == (True, 1)
        state.roster.restate(worker, spec("a"))
        await state.up(worker)
        assert (state.indexer.watches(rank), state.indexer.index.blocks(rank, Tier.GPU)) == (False, 0)
        await state.roster.close()
        await state.plane.close()


class Publisher:
    """Of an engine's events; cannot be closed if it `fails`."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.closed = False

    async def close(self) -> None:
        self.closed = True
        if self.fails:
            raise ConnectionResetError


def follow(state: State, worker: Worker, *, fails: bool) -> Publisher:
    publisher = Publisher(fails)
    state.resources._followed[worker.id] = _Followed((), cast("EnginePublisher", publisher))
    return publisher


async def test_a_worker_leaves_though_its_publisher_cannot_be_closed(
    state: State, caplog: pytest.LogCaptureFixture
) -> None:
    worker = state.roster.join(spec("a"))
    await state.up(worker)
    follow(state, worker, fails=True)
    state.roster.leave(worker, 0.0)
    await state.gone("a")
    assert state.scheduler.book.get_metrics(0.0) == {}
    assert "A publisher could not be closed" in caplog.messages


class Meeting(Publisher):
    """Is closed once the other is being closed too."""

    def __init__(self, others: asyncio.Barrier) -> None:
        super().__init__(fails=False)
        self.others = others

    async def close(self) -> None:
        await self.others.wait()
        await super().close()


async def test_all_publishers_are_closed_at_once(state: State) -> None:
    """A thousand one after another, each a few turns of a busy event loop, would outlast a pod's grace period."""
    together = asyncio.Barrier(2)
    publishers = [Meeting(together), Meeting(together)]
    for name, publisher in zip("ab", publishers, strict=True):
        state.resources._followed[name] = _Followed((), cast("EnginePublisher", publisher))
    try:
        async with asyncio.timeout(30):
            await state.roster.close()
    finally:
        await together.abort()
    assert [publisher.closed for publisher in publishers] == [True, True]


async def test_all_ends_though_one_publisher_cannot_be_closed(state: State) -> None:
    a, b = state.roster.join(spec("a")), state.roster.join(spec("b"))
    follow(state, a, fails=True)
    other = follow(state, b, fails=False)
    await state.roster.close()
    assert other.closed


@pytest.mark.parametrize(("stated", "size", "room"), [("", 16, 8), (",block_size=32", 32, 4)])
async def test_a_worker_without_events_is_assumed_to_hold_what_has_room_in_its_cache(
    state: State, stated: str, size: int, room: int
) -> None:
    state.take(f"http://a:1,name=a{stated}")
    await state.up(state.fleet.workers["a"], ranks=2)
    for rank in state.fleet.workers["a"].ranks:
        state.indexer.predict(rank, hash_prompt(list(range(size * 20)), [size], PLAIN).chain(size), now=0.0)
        state.indexer.expire(1e6)
        assert state.indexer.index.blocks(rank, Tier.GPU) == room


async def test_an_engine_that_does_not_tell_its_cache_is_not_taken_to_have_the_one_before(state: State) -> None:
    worker = state.roster.join(spec("a"))
    await state.up(worker)
    assert worker.description
    worker.description = msgspec.structs.replace(worker.description, total_blocks=None)
    await state.resources.set_up(worker)
    state.indexer.predict(WorkerRank("a", 0), hash_prompt(list(range(320)), [16], PLAIN).chain(16), now=0.0)
    assert state.indexer.index.blocks(WorkerRank("a", 0), Tier.GPU) == 20
    state.indexer.expire(100.0)
    assert state.indexer.index.blocks(WorkerRank("a", 0), Tier.GPU) == 0


async def test_ranks_that_an_engine_has_no_more_are_forgotten(state: State) -> None:
    worker = state.roster.join(spec("a"))
    await state.up(worker, ranks=3)
    await state.up(worker, ranks=1)
    assert list(state.scheduler.book.get_metrics(0.0)) == [WorkerRank("a", 0)]


async def test_who_is_asked_to_leave_waits_for_what_is_in_flight(state: State) -> None:
    worker = state.roster.join(spec("a"))
    await state.up(worker)
    reservation = state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    state.roster.leave(worker, 60.0)
    assert (worker.state, state.roster.in_flight(worker), state.roster.leaves_in(worker)) == ("draining", 1, 60.0)
    state.now = 50.0
    assert state.roster.leaves_in(worker) == 10.0
    state.roster.leave(worker, 100.0)
    assert state.roster.leaves_in(worker) == 100.0
    with pytest.raises(Conflict, match="leaving"):
        state.roster.join(spec("a", host="other"))
    state.roster.join(spec("b", host="a"))  # its address is free
    reservation.release()
    await state.gone("a")
    assert (worker.state, state.roster.leaves_in(worker)) == ("draining", None)
    assert state.names == ["b"]


async def test_a_deadline_that_was_put_off_is_waited_for(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = state.roster.join(spec("a"))
    await state.up(worker)
    reservation = state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    state.roster.leave(worker, 60.0)
    pauses = recorded_pauses(monkeypatch)
    await until(lambda: pauses)
    state.roster.leave(worker, 100.0)
    state.now = 70.0
    pauses.clear()
    await until(lambda: len(pauses) > 20)
    assert not worker.pool.is_cut
    reservation.release()
    await state.gone("a")


async def test_draining_is_told_once(state: State, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker = state.roster.join(spec("a"))
    for draining in (False, True, True, False, False):
        state.roster.drain(worker, draining)
        assert worker.draining == draining
    assert caplog.messages == ["Worker drains", "Worker drains no more"]


async def test_the_deadline_is_kept_though_something_stays_in_flight(
    state: State, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(roster, "_CUT_OFF_GRACE", 0.05)
    worker = state.roster.join(spec("a"))
    await state.up(worker)
    state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    state.roster.leave(worker, 60.0)
    state.now = 61.0
    await state.gone("a")
    assert [record.__dict__["fields"]["cut_off"] for record in caplog.records if "has left" in record.message] == [1]
    again = state.roster.join(spec("a"))
    await state.up(again)
    assert state.roster.in_flight(again) == 0


async def test_who_leaves_is_gone_even_if_something_of_it_cannot_be_discarded(
    state: State, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(worker: Worker) -> None:
        raise ValueError("of whatever kind")

    worker = state.roster.join(spec("a"))
    await state.up(worker)
    monkeypatch.setattr(state.resources, "discard", fail)
    state.roster.leave(worker, 60.0)
    await state.gone("a")
    assert state.roster.join(spec("a")) is not worker
    assert "is not all discarded" in caplog.text


async def test_calling_back(state: State) -> None:
    worker = state.roster.join(spec("a"))
    await state.up(worker)
    reservation = state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    state.roster.leave(worker, 60.0)
    leaving = state.roster._leaving["a"].task
    state.roster.drain(worker, False)
    assert (worker.state, state.roster.leaves_in(worker)) == ("up", None)
    await until(leaving.done)
    assert leaving.cancelled()
    state.roster.leave(worker, 0.0)
    await until(lambda: state.roster._leaving["a"].committed)
    with pytest.raises(Conflict, match="just leaving"):
        state.roster.drain(worker, False)
    assert state.roster.leaves_in(worker) == 0.0
    state.roster.leave(worker, 60.0)
    reservation.release()
    await state.gone("a")


async def test_whose_address_another_has_by_now_is_not_called_back(state: State) -> None:
    worker = state.roster.join(spec("a"))
    await state.up(worker)
    state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    state.roster.leave(worker, 60.0)
    state.roster.join(spec("b", host="a"))
    with pytest.raises(Conflict, match="is here already, as 'b'"):
        state.roster.drain(worker, False)
    assert (worker.state, state.roster.leaves_in(worker)) == ("draining", 60.0)


# -- what is stated

MOVED = {"new": "http://a:1", "one": "http://b:1"}


async def test_what_is_stated_anew_is_a_change_of_what_was_stated_before(state: State) -> None:
    assert state.take("http://a:1,name=a", "http://b:1,name=b") == ["a", "b"]
    state.roster.join(spec("mine"))
    assert state.take("http://a:1,name=a", "http://b:1,name=b") == []
    assert sorted(state.take("http://b:1,name=b", "http://c:1,name=c")) == ["a", "c"]
    state.watches[-1].first_check.set()
    await state.gone("a")
    assert state.names == ["b", "mine", "c"]
    state.roster.leave(state.fleet.workers["b"], 0.0)
    await state.gone("b")
    assert state.take("http://b:1,name=b", "http://c:1,name=c") == []
    assert state.names == ["mine", "c"], "what was done otherwise stays so"
    assert state.take("http://c:1,name=c", "http://d:1,name=d") == ["b", "d"]
    assert state.names == ["mine", "c", "d"]


async def test_those_that_are_replaced_serve_until_the_others_were_looked_at(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "_POLL", 0.0)
    monkeypatch.setattr(roster, "_MOST_POLLS", 10**9)
    state.take("http://a:1,name=a", "http://b:1,name=b")
    a, b = state.fleet.workers.values()
    for worker in (a, b):
        await state.up(worker)
    state.take("http://c:1,name=c", "http://a:1,name=d")
    for _ in range(50):
        await asyncio.sleep(0)
    assert (a.state, b.state) == ("up", "up")
    assert len(state.fleet.candidates("m")) == 2
    state.watches[2].first_check.set()
    state.take("http://c:1,name=c", "http://a:1,name=d", "http://b:1,name=b")
    assert b.state == "up", "it is stated again"
    state.watches[3].first_check.set()
    await state.gone("a")
    assert state.names == ["b", "c", "d"]
    assert b.state == "up"


@pytest.mark.parametrize("end", ["deadline", "patience", "by hand", "nobody joins"])
async def test_they_do_not_wait_for_ever(state: State, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if end == "patience":
        monkeypatch.setattr(roster, "_NEWCOMERS", 0.0)
    state.take("http://a:1,name=a")
    worker = state.fleet.workers["a"]
    await state.up(worker)
    state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    specs = [] if end == "nobody joins" else [spec("b")]
    state.roster.take(specs, 0.0 if end == "deadline" else 60.0)
    if end == "nobody joins":
        assert worker.draining
    elif end == "by hand":
        assert not worker.draining
        state.roster.leave(worker, 60.0)
        assert worker.draining
    else:
        await until(lambda: worker.draining)


async def test_one_that_waits_for_others_to_join_can_be_removed_at_once(state: State) -> None:
    state.take("http://a:1,name=a")
    await state.up(state.fleet.workers["a"])
    state.take("http://b:1,name=b")
    await asyncio.sleep(0)
    state.roster.leave(state.fleet.workers["a"], 0.0)
    async with asyncio.timeout(roster._NEWCOMERS / 2):
        await state.gone("a")


async def test_roles_count_at_once_and_the_rest_from_the_next_look(state: State) -> None:
    state.take("http://a:1,name=a", "http://b:1,name=b")
    a, b = state.fleet.workers.values()
    changed = state.take("http://a:1,name=a,role=decode,connector=nixl", "http://b:1,name=b,block_size=64,store=false")
    assert changed == ["a", "b"]
    assert (a.role, a.connector, b.block_size, b.spec.store) == ("decode", "nixl", 64, False)
    assert [watch.stale for watch in state.watches] == [False, True]
    assert len(state.watches) == 2, "they are the same workers"


async def test_who_is_drained_by_hand_stays_so_whatever_is_stated_anew(state: State) -> None:
    state.take("http://a:1,name=a")
    worker = state.fleet.workers["a"]
    await state.up(worker)
    state.roster.drain(worker, True)
    state.take("http://a:1,name=a,role=decode")
    assert (worker.state, worker.role) == ("draining", "decode")


async def test_another_address_under_a_name_waits_for_the_first_to_leave(state: State) -> None:
    state.take("http://a:1,name=a")
    worker = state.fleet.workers["a"]
    await state.up(worker)
    reservation = state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    state.take("http://other:1,name=a")
    assert (worker.state, worker.spec.url) == ("draining", "http://a:1")
    state.take("http://third:1,name=a")
    reservation.release()
    await until(lambda: [each.spec.url for each in state.fleet.workers.values()] == ["http://third:1"])
    assert state.fleet.workers["a"].state == "down"


async def test_who_is_stated_again_before_it_has_left_stays(state: State) -> None:
    state.take("http://a:1,name=a", "http://b:1,name=b")
    worker = state.fleet.workers["a"]
    await state.up(worker)
    state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    state.take("http://b:1,name=b")
    assert worker.state == "draining"
    state.take("http://a:1,name=a,role=prefill", "http://b:1,name=b")
    assert (worker.state, worker.role) == ("up", "prefill")
    state.take("http://other:1,name=a", "http://b:1,name=b")
    state.take("http://b:1,name=b")
    assert state.roster._successors == {}


async def test_who_is_stated_again_when_it_is_just_leaving_joins_anew(state: State) -> None:
    state.take("http://a:1,name=a")
    worker = state.fleet.workers["a"]
    await state.up(worker)
    reservation = state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    state.take()
    state.roster.leave(worker, 0.0)
    await until(lambda: state.roster._leaving["a"].committed)
    state.take("http://a:1,name=a")
    reservation.release()
    await until(lambda: state.fleet.workers.get("a", worker) is not worker)


async def test_who_is_stated_again_leaves_where_another_has_its_address_by_now(
    state: State, caplog: pytest.LogCaptureFixture
) -> None:
    state.take("http://a:1,name=a")
    worker = state.fleet.workers["a"]
    await state.up(worker)
    reservation = state.scheduler.book.reserve(WorkerRank("a", 0), 10, 10)
    state.take()
    state.roster.join(spec("mine", host="a"))
    state.take("http://a:1,name=a")
    assert (worker.state, "A worker cannot join" in caplog.text) == ("draining", True)
    reservation.release()
    await state.gone("a")
    state.roster.leave(state.fleet.workers["mine"], 0.0)
    await state.gone("mine")
    assert state.take("http://a:1,name=a") == ["a"], "the next reading tries again"
    assert state.names == ["a"]


async def test_who_stands_against_another_cannot_join(state: State, caplog: pytest.LogCaptureFixture) -> None:
    state.roster.join(spec("mine", host="a"))
    assert state.take("http://a:1,name=a", "http://b:1,name=b") == ["a", "b"]
    assert state.names == ["mine", "b"]
    assert "A worker cannot join" in caplog.text


async def test_who_comes_may_have_the_address_of_one_that_moves_whatever_their_order(state: State) -> None:
    state.take("http://a:1,name=one")
    state.take("http://a:1,name=new", "http://b:1,name=one")
    await until(lambda: {each.id: each.spec.url for each in state.fleet.workers.values()} == MOVED)


async def test_who_stays_after_all_may_have_the_address_back_from_one_that_moves(state: State) -> None:
    state.take("http://a:1,name=a")
    state.take("http://a:1,name=b")
    assert state.take("http://a:1,name=a", "http://b:1,name=b") == ["a", "b"]
    await until(lambda: state.fleet.workers["b"].spec.url == "http://b:1")
    assert {name: worker.draining for name, worker in state.fleet.workers.items()} == {"a": False, "b": False}
    assert not state.roster._leaving


async def test_who_could_not_join_is_tried_with_the_next_reading(state: State) -> None:
    state.roster.join(spec("mine", host="a"))
    state.take("http://a:1,name=a")
    state.roster.leave(state.fleet.workers["mine"], 0.0)
    await state.gone("mine")
    assert state.take("http://a:1,name=a") == ["a"]
    assert state.names == ["a"]


def test_every_key_of_a_worker_is_a_role_or_looked_at_anew() -> None:
    """Its name and its URL make it another."""
    from router.workers.roster import _without_role  # noqa: PLC0415

    whole = spec(
        "a", ",events=tcp://h:1,replay=tcp://h:2,block_size=1,role=both,connector=nixl,bootstrap_port=1,host=h"
    )
    kept: dict[str, Any] = msgspec.structs.asdict(_without_role(whole))
    assert {key for key, value in kept.items() if value is None} == {"role", "connector", "bootstrap_port", "host"}
