"""Events that never come are missed: over a broker, how their publisher should speak is told; without, where it should
be."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engines.description import EngineDescription, EventSource
from indexer.cursor import SILENCE, View
from indexer.events import NO_EVENTS, EventBatch, LoadReport
from indexer.hashing import HASH_VERSION
from indexer.kv_indexer import KVIndexer
from indexer.types import WorkerRank
from publishers.embedded_nats import NatsServer
from publishers.local_plane import LocalPlane
from router.app import App
from router.events.missing_events import PATIENCE, MissingEvents
from router.http.pool import Pool
from router.settings import Settings
from router.workers.fleet import Fleet
from router.workers.spec import parse_worker
from router.workers.worker import Worker
from tests.fakes.raw_client import RawClient, get
from tests.fakes.scripted_worker import ScriptedWorker
from tests.nats_fixture import nats_server
from tests.router.proxy.conftest import a
from tests.router.proxy.running import RunningRouter, running

__all__ = ["a", "nats_server"]

R0, R1 = WorkerRank("w", 0), WorkerRank("w", 1)


SOURCES = (EventSource(0, "tcp://w:5557"), EventSource(1, "tcp://w:5558"))


class Watched:
    """Worker w with two ranks, which is up."""

    def __init__(self, namespace: str | None = "fleet", stated: str = "") -> None:
        self.worker = Worker(parse_worker(f"http://w:1,name=w{stated}"), Pool("http://w:1", 1))
        self.worker.description = EngineDescription("vllm", dp_size=2, event_sources=SOURCES)
        self.fleet, self.indexer, self.plane = Fleet([self.worker]), KVIndexer(), LocalPlane()
        self.plane.connected = True
        self.fleet.mark_up(self.worker)
        for rank in (R0, R1):
            self.indexer.watch(rank)
        self.missing_events = MissingEvents(self.fleet, self.indexer, self.plane, namespace)

    def hear(self, *ranks: WorkerRank) -> None:
        for rank in ranks:
            self.indexer.on_batch(EventBatch(*rank, 1, 0, []))

    def problem(self, now: float) -> str:
        self.missing_events.tick(now)
        return self.missing_events.problems.get("w", "")


def test_a_publisher_is_missed_after_a_while_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    assert not watched.problem(5.0)
    assert not watched.problem(5.0 + PATIENCE - 0.1)
    missed = watched.problem(5.0 + PATIENCE)
    assert all(word in missed for word in ("publisher", "dp_rank 0, 1", "--worker-id w ", "--namespace fleet"))
    assert watched.problem(99.0) == missed
    assert caplog.messages == [missed]


def test_who_comes_at_once_under_the_name_of_one_that_left_has_its_own_time_and_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.missing_events.tick(5.0)
    missed = watched.problem(5.0 + PATIENCE)
    watched.missing_events.forget("w")
    assert not watched.missing_events.problems
    assert not watched.problem(20.0)
    assert watched.problem(20.0 + PATIENCE) == missed
    assert caplog.messages == [missed, missed]


def test_a_rank_alone_is_missed_until_it_is_heard() -> None:
    watched = Watched()
    watched.hear(R0)
    watched.missing_events.tick(0.0)
    assert "dp_rank 1 " in watched.problem(PATIENCE)
    watched.hear(R1)
    assert not watched.problem(PATIENCE + 1)


def test_a_publisher_without_events_is_not_said_to_be_missing() -> None:
    watched = Watched()
    watched.missing_events.tick(0.0)
    for rank in (R0, R1):
        watched.indexer.on_report(LoadReport(*rank, NO_EVENTS, -1, True))
    assert "--worker-id" not in watched.problem(PATIENCE)
    assert "no KV events" in watched.problem(PATIENCE)
    for _ in range(SILENCE + 1):
        watched.indexer.on_tick(connected=True)
    assert "--worker-id" in watched.problem(PATIENCE + 1), "it has ended"


def test_the_publisher_that_is_missed_is_not_said_to_report_where_its_worker_was_restarted() -> None:
    watched = Watched()
    watched.hear(R0, R1)
    for rank in (R0, R1):
        watched.indexer.on_report(LoadReport(*rank, 1, 0, True))
    for _ in range(SILENCE + 1):
        watched.indexer.on_tick(connected=True)
    for rank in (R0, R1):
        watched.indexer.worker_restarted(rank)
    watched.missing_events.tick(0.0)
    assert "--worker-id" in watched.problem(PATIENCE)


def test_a_publisher_that_falls_silent_is_told_of_until_it_speaks_again(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    reports = [LoadReport(*rank, 1, 0, True) for rank in (R0, R1)]
    watched.hear(R0, R1)
    for report in reports:
        watched.indexer.on_report(report)
    assert not watched.problem(0.0)
    for _ in range(SILENCE):
        watched.indexer.on_tick(connected=True)
        watched.indexer.on_report(reports[0])
    watched.indexer.on_tick(connected=True)
    assert not watched.problem(1.0)
    silent = watched.problem(1.0 + PATIENCE)
    assert all(word in silent for word in ("dp_rank 1 ", "silent"))
    assert caplog.messages == [silent]
    watched.indexer.on_report(reports[1])
    assert not watched.problem(2.0 + PATIENCE)


def test_a_publisher_of_another_version_is_not_only_said_to_be_silent() -> None:
    """It speaks and answers all the while, as when publishers are upgraded after the router, or before."""
    watched = Watched()
    foreign = EventBatch(*R0, 1, 0, [], hash_version=HASH_VERSION + 1)
    watched.indexer.on_batch(foreign)
    watched.hear(R1)
    watched.indexer.on_report(LoadReport(*R0, 1, 0, True))
    assert watched.indexer.counts["other_hash_version"] == 1
    watched.missing_events.tick(0.0)
    assert all(word in watched.problem(PATIENCE) for word in ("dp_rank 0 ", "version"))
    watched.indexer.on_batch(foreign)  # what it answers
    told = watched.problem(PATIENCE)
    assert all(word in told for word in ("dp_rank 0 ", "version", "upgrade"))
    assert "silent" not in told


def test_a_publisher_whose_rank_is_learned_anew_is_not_said_to_be_silent(caplog: pytest.LogCaptureFixture) -> None:
    """As after an alarm for drift, for up to five minutes. It publishes all the while."""
    watched = Watched()
    watched.hear(R0, R1)
    watched.indexer.relearn(R0)
    for second in range(int(2 * PATIENCE)):
        for rank in (R0, R1):
            watched.indexer.on_report(LoadReport(*rank, 1, 0, True))
        watched.indexer.on_tick(connected=True)
        assert not watched.problem(float(second))
    assert watched.indexer.view(R0) is View.RECOVERING
    assert not caplog.messages
    for rank in (R0, R1):
        watched.indexer.on_report(LoadReport(*rank, 1, 1, True))
        watched.indexer.on_report(LoadReport(*rank, 1, 1, True))
    watched.missing_events.tick(50.0)
    assert "dp_rank 0, 1 " in watched.problem(50.0 + PATIENCE), "a batch is missing, and nobody answers for it"


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ("", " tcp://w:5557, tcp://w:5558;"),
        (",events=tcp://x:1", " tcp://x:1;"),
        (",events=tcp://x:1,replay=tcp://x:2", " tcp://x:1, or at tcp://x:2 for their replay;"),
    ],
)
def test_without_a_broker_it_is_told_where_events_should_come_from(stated: str, named: str) -> None:
    """Load comes all the same, since it is asked for over HTTP."""
    watched = Watched(None, stated)
    watched.missing_events.tick(0.0)
    for rank in (R0, R1):
        watched.indexer.on_report(LoadReport(*rank, NO_EVENTS, -1, True))
    missed = watched.problem(PATIENCE)
    assert all(word in missed for word in ("dp_rank 0, 1 ", named, "--worker URL,events=tcp://HOST:PORT"))
    assert "--worker-id" not in missed


def test_a_replay_that_nobody_answers_is_named_too() -> None:
    """Events wait for it, so none have come where it alone is shut off."""
    watched = Watched(None)
    sources = tuple(EventSource(each.dp_rank, each.endpoint, f"tcp://w:565{each.dp_rank}") for each in SOURCES)
    watched.worker.description = EngineDescription("vllm", dp_size=2, event_sources=sources)
    watched.missing_events.tick(0.0)
    missed = watched.problem(PATIENCE)
    assert " tcp://w:5557, tcp://w:5558, or at tcp://w:5650, tcp://w:5651 for their replay;" in missed
    assert missed.endswith(" --worker URL,events=tcp://HOST:PORT,replay=tcp://HOST:PORT.")


async def last_problem(router: RunningRouter, client: RawClient) -> Any:
    """What /ready says last of its one worker, once it has been up for long enough. The router looks by itself too, at
    any time, and must find the same."""
    missing, now = router.app._missing_events, time.monotonic()
    missing._since.clear()
    for at in (now - PATIENCE, now):
        missing.tick(at)
    (worker,) = json.loads((await client.ask(get("/ready"))).body)["workers"]
    return worker["problems"][-1]


async def test_ready_names_an_endpoint_where_nobody_is(a: ScriptedWorker) -> None:
    async with (
        running(a, router_mode="kv", options=",events=tcp://127.0.0.1:1,block_size=16") as router,
        router.client() as client,
    ):
        missed = await last_problem(router, client)
        followed = router.app._roster and router.app._roster._resources._followed["a"].publisher
        assert followed
        assert followed._connect_patience is None  # so that it is told of once
    assert "tcp://127.0.0.1:1" in missed


def test_what_cannot_be_heard_is_not_missed() -> None:
    watched = Watched()
    watched.missing_events.tick(0.0)
    watched.plane.connected = False
    assert not watched.problem(PATIENCE)
    watched.plane.connected = True
    assert not watched.problem(PATIENCE + 1), "the time begins anew"
    watched.fleet.mark_down(watched.worker, "gone")
    assert not watched.problem(2 * PATIENCE + 1)
    watched.fleet.mark_up(watched.worker)
    assert not watched.problem(2 * PATIENCE + 2)
    assert watched.problem(3 * PATIENCE + 2)
    watched.indexer.forget(R0)
    watched.indexer.forget(R1)
    assert not watched.problem(99.0), "without --kv-events nothing is expected"


def test_a_worker_that_comes_back_is_not_warned_of_again(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for now in (0.0, PATIENCE, PATIENCE + 1):
        watched.missing_events.tick(now)
    watched.fleet.mark_down(watched.worker, "gone")
    watched.missing_events.tick(50.0)
    watched.fleet.mark_up(watched.worker)
    for now in (60.0, 60.0 + PATIENCE):
        watched.missing_events.tick(now)
    assert sum("--worker-id" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("keys", [",events=tcp://a:1", ",replay=tcp://a:2"])
async def test_what_a_broker_makes_needless_is_said_to_be_so(keys: str, caplog: pytest.LogCaptureFixture) -> None:
    app = App(Settings(event_plane="nats://127.0.0.1:1"))
    for stated in ("", keys):
        app._make_worker(parse_worker(f"http://a:1{stated}"))
    (told,) = caplog.messages
    assert "--events" in told


@pytest.mark.nats
async def test_ready_names_what_is_missing(a: ScriptedWorker, nats_server: NatsServer) -> None:
    async with (
        running(a, router_mode="kv", event_plane=nats_server.url, event_namespace="fleet") as router,
        router.client() as client,
    ):
        missed = await last_problem(router, client)
    assert "--worker-id a and --namespace fleet" in missed
