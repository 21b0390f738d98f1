"""The plug-in's thread, without vLLM: any structs that encode to the wire format do."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

import publishers.in_process
from engines.rank_load import RankLoad
from engines.vllm.decode import Decoder
from indexer.events import NO_EVENTS, EventBatch, LoadReport, Stored, decode_batch, decode_load, unpack_hashes
from indexer.types import WorkerRank
from publishers.embedded_nats import NatsServer
from publishers.in_process import FAILED, EventThread, FiguresThread
from publishers.local_plane import LocalPlane
from publishers.nats_plane import NatsPlane
from publishers.plane import EventPlane, all_events, all_loads, figures_subject
from publishers.plugin_settings import Settings, settings_from
from publishers.vllm_plugin import UNKNOWN_VERSION, register
from tests.fakes.waiting import until
from tests.fakes.zmq_engine import CLEARED, stored
from tests.nats_fixture import nats_server

__all__ = ["nats_server"]

BATCH: Any = [1.0, [stored(1, 2)], None]


class Router:
    def __init__(self, plane: EventPlane) -> None:
        self.plane = plane
        self.figures: list[bytes] = []
        self.batches: list[EventBatch] = []
        self.reports: list[LoadReport] = []

    @property
    def held(self) -> int:
        return sum(len(unpack_hashes(event.hashes)) for batch in self.batches for event in batch.events
                   if isinstance(event, Stored))  # fmt: skip


@asynccontextmanager
async def listening(server: NatsServer) -> AsyncIterator[Router]:
    plane = NatsPlane([server.url])
    router = Router(plane)
    await plane.start()
    await plane.subscribe(all_events("ns"), lambda payload: router.batches.append(decode_batch(payload)))
    await plane.subscribe(all_loads("ns"), lambda payload: router.reports.append(decode_load(payload)))
    yield router
    await plane.close()


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-router")]


@pytest.mark.nats
async def test_events_and_figures_of_two_processes_become_one_workers(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers.in_process, "REPORT_INTERVAL", 0.01)
    settings = Settings(nats_server.url, "w", "ns")
    async with listening(nats_server) as router:
        core, front_end = EventThread(settings, 3, Decoder), FiguresThread(settings, 3, interval=0.01)
        await until(lambda: router.reports)
        front_end.update(RankLoad(request_active_slots=5))
        core.publish(BATCH)
        await until(lambda: router.held == 2)
        await until(lambda: router.reports[-1].request_active_slots == 5 and router.reports[-1].event_id == 0)
        assert router.batches[0].rank == WorkerRank("w", 3)
        assert router.reports[-1].exact
        for block in range(3, 3003):
            core.publish([1.0, [stored(block)], None])
        core.stop()  # what waits still goes out
        front_end.stop()
        await until(lambda: router.held == 3002)
    assert our_threads() == []


@pytest.mark.nats
async def test_figures_that_were_lost_come_again(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an engine that is idle since would be taken for busy, get nothing to do, and make no others."""
    monkeypatch.setattr(publishers.in_process, "REPORT_INTERVAL", 0.01)
    settings = Settings(nats_server.url, "w", "ns")
    async with listening(nats_server) as router:
        await router.plane.subscribe(figures_subject("ns", WorkerRank("w", 0)), router.figures.append)
        front_end = FiguresThread(settings, 0, interval=0.01)
        front_end.update(RankLoad(request_active_slots=0))
        await until(lambda: router.figures)  # nobody else has heard them
        core = EventThread(settings, 0, Decoder)
        await until(lambda: router.reports and router.reports[-1].request_active_slots == 0)
        core.stop()
        front_end.stop()


@pytest.mark.nats
async def test_of_several_front_ends_the_one_that_has_heard_last_is_believed(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers.in_process, "REPORT_INTERVAL", 0.01)
    settings = Settings(nats_server.url, "w", "ns")
    async with listening(nats_server) as router:
        await router.plane.subscribe(figures_subject("ns", WorkerRank("w", 0)), router.figures.append)
        core = EventThread(settings, 0, Decoder)
        front_ends = [FiguresThread(settings, 0, interval=0.01) for _ in range(3)]
        front_ends[0].update(RankLoad(request_active_slots=5))
        await until(lambda: router.reports and router.reports[-1].request_active_slots == 5)
        front_ends[1].update(RankLoad(request_active_slots=1))
        await until(lambda: router.reports[-1].request_active_slots == 1)
        told = len(router.figures)
        router.reports.clear()
        await until(lambda: len(router.figures) > told + 10 and len(router.reports) > 5)
        assert {report.request_active_slots for report in router.reports} == {1}
        core.stop()
        for front_end in front_ends:
            front_end.stop()


@pytest.mark.nats
async def test_figures_of_another_machine_count_no_longer_than_they_are_repeated(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an engine that was given this one's worker id by mistake: its clock may be ahead by months."""
    monkeypatch.setattr(publishers.in_process, "REPORT_INTERVAL", 0.01)
    monkeypatch.setattr(publishers.in_process, "FIGURES_PATIENCE", 0.05)
    settings = Settings(nats_server.url, "w", "ns")
    stray = msgspec.msgpack.encode({"at": 2**62, "load": {"request_active_slots": 7}})
    async with listening(nats_server) as router:
        core = EventThread(settings, 0, Decoder)
        await until(lambda: router.reports)
        router.plane.publish(figures_subject("ns", WorkerRank("w", 0)), stray)
        await until(lambda: router.reports[-1].request_active_slots == 7)
        front_end = FiguresThread(settings, 0, interval=0.01)
        front_end.update(RankLoad(request_active_slots=5))
        await until(lambda: router.reports[-1].request_active_slots == 5)
        core.stop()
        front_end.stop()


@pytest.mark.nats
async def test_too_many_events_never_block_and_are_said(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers.in_process, "QUEUE_LIMIT", 10)
    monkeypatch.setattr(publishers.in_process, "REPORT_INTERVAL", 0.01)
    await nats_server.stop()  # so that nothing leaves the queue before it is full
    thread = EventThread(Settings(nats_server.url, "w", "ns"), 0, Decoder)
    for block in range(100):
        thread.publish([1.0, [stored(block)], None])
    assert thread.dropped > 0
    await nats_server.start()
    async with listening(nats_server) as router:
        await until(lambda: router.reports and not router.reports[-1].exact)
    thread.stop()
    assert our_threads() == []


@pytest.mark.nats
async def test_an_unusable_batch_is_said_and_the_next_one_published(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    thread = EventThread(Settings(nats_server.url, "w", "ns"), 0, Decoder)
    async with listening(nats_server) as router:
        thread.publish(object())
        thread.publish(BATCH)
        await until(lambda: router.batches)
    thread.stop()
    assert "A batch of the engine cannot be published" in caplog.text


class FailingPlane(LocalPlane):
    """With a receiver of its own; raises what nobody expects for as many load reports as it is told."""

    failures = 0

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(self)

    async def start(self) -> None:
        await super().start()
        await self.subscribe(all_events("ns"), lambda payload: self.router.batches.append(decode_batch(payload)))
        await self.subscribe(all_loads("ns"), lambda payload: self.router.reports.append(decode_load(payload)))

    def publish(self, subject: str, payload: bytes) -> None:
        if self.failures and subject.startswith("kv.ns.load."):
            self.failures -= 1
            raise RuntimeError("theirs")
        super().publish(subject, payload)


async def test_after_a_failure_that_nobody_foresaw_it_begins_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plane = FailingPlane()
    monkeypatch.setattr(publishers.in_process, "REPORT_INTERVAL", 0.001)
    monkeypatch.setattr(publishers.in_process, "make_plane", lambda *_: plane)
    router, thread = plane.router, EventThread(Settings("local", "w", "ns"), 0, Decoder, restart_delay=0.001)
    thread.publish(BATCH)
    await until(lambda: router.reports and router.reports[-1].event_id == 0 and router.reports[-1].exact)
    old = router.batches[-1].epoch
    plane.failures = 1
    await until(lambda: router.reports[-1].epoch > old)
    assert NO_EVENTS in [report.epoch for report in router.reports]  # meanwhile nobody takes it for exact
    assert not router.reports[-1].exact  # what the engine held before it does not say again
    thread.publish([1.0, [CLEARED, stored(8)], None])
    await until(lambda: router.batches[-1].epoch > old and router.reports[-1].exact)
    thread.stop()
    told = [record for record in caplog.records if record.getMessage() == FAILED]
    assert [bool(record.exc_info) for record in told] == [True]
    assert our_threads() == []


def test_nobody_is_harmed_after_the_end_and_without_a_server() -> None:
    thread = EventThread(Settings("nats://127.0.0.1:9", "w", "ns"), 0, Decoder)
    thread.publish(BATCH)
    thread.stop()
    thread.publish(BATCH)
    thread.stop()
    assert our_threads() == []


@pytest.mark.parametrize(
    ("environ", "settings", "said"),
    [
        ({}, None, ""),
        ({"KV_ROUTER_WORKER_ID": "w"}, None, ""),
        ({"KV_ROUTER_NATS": "nats://n"}, None, "KV_ROUTER_WORKER_ID is not"),
        (
            {"KV_ROUTER_NATS": "nats://n", "KV_ROUTER_WORKER_ID": "http://gpu-1:8000"},
            None,
            "KV_ROUTER_WORKER_ID takes the worker's name in the router",
        ),
        (
            {"KV_ROUTER_NATS": "nats://n", "KV_ROUTER_WORKER_ID": "[fe80::1%eth0]:8000"},
            Settings("nats://n", "[fe80::1%eth0]:8000"),
            "",
        ),
        ({"KV_ROUTER_NATS": "nats://n/x", "KV_ROUTER_WORKER_ID": "w"}, None, "cannot be used"),
        ({"KV_ROUTER_NATS": "http://n", "KV_ROUTER_WORKER_ID": "w"}, None, "cannot be used"),
        ({"KV_ROUTER_NATS": "local", "KV_ROUTER_WORKER_ID": "w"}, None, "cannot be used"),
        ({"KV_ROUTER_NATS": "nats+embedded://:4222", "KV_ROUTER_WORKER_ID": "w"}, None, "cannot be used"),
        ({"KV_ROUTER_NATS": "nats://n", "KV_ROUTER_WORKER_ID": "w"}, Settings("nats://n", "w"), ""),
        (
            {"KV_ROUTER_NATS": "nats://n", "KV_ROUTER_WORKER_ID": "w", "KV_ROUTER_NAMESPACE": "x"},
            Settings("nats://n", "w", "x"),
            "",
        ),
        (
            {"KV_ROUTER_NATS": "nats://n", "KV_ROUTER_WORKER_ID": "w", "KV_ROUTER_NAMESPACE": "my fleet"},
            None,
            "KV_ROUTER_NAMESPACE takes letters",
        ),
        (
            {"KV_ROUTER_NATS": "nats://n", "KV_ROUTER_WORKER_ID": "w", "KV_ROUTER_FIRST_RANK": "8"},
            Settings("nats://n", "w", first_rank=8),
            "",
        ),
        (
            {"KV_ROUTER_NATS": "nats://n", "KV_ROUTER_WORKER_ID": "w", "KV_ROUTER_FIRST_RANK": "-1"},
            None,
            "KV_ROUTER_FIRST_RANK takes a number",
        ),
    ],
)
def test_settings(
    environ: dict[str, str], settings: Settings | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert settings_from(environ) == settings
    assert said in caplog.text
    assert bool(said) == bool(caplog.records)


@pytest.mark.parametrize("name", ["CREDS", "NKEY_SEED"])
def test_an_engines_environment_may_be_without_what_reads_keys(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "login"
    file.write_text("-BEGIN NATS USER JWT-\n-BEGIN USER NKEY SEED-\n")
    monkeypatch.setitem(sys.modules, "nkeys", None)
    given = {"KV_ROUTER_NATS": "nats://n", "KV_ROUTER_WORKER_ID": "w", f"KV_ROUTER_NATS_{name}": str(file)}
    assert settings_from(given) is None
    assert "need the package nkeys" in str(caplog.records[-1].__dict__["fields"]["error"])


def test_what_is_wrong_is_said_in_full_where_nobody_has_set_up_logging() -> None:
    """As in vLLM, which sets it up for its own lines only."""
    wrong = {"KV_ROUTER_NATS": "nats://h/x", "KV_ROUTER_WORKER_ID": "w"}
    code = f"from publishers.plugin_settings import settings_from\nfor _ in range(2): settings_from({wrong!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.count("error=\"'nats://h/x' names no event plane: expected") == 2, ran.stderr


def test_ranks_are_counted_from_a_servers_first() -> None:
    """vLLM numbers all servers' ranks together: data_parallel_index in v1/core/sched/scheduler.py."""
    settings = Settings("nats://n", "w", first_rank=8)
    assert [settings.rank(8), settings.rank(9)] == [0, 1]
    assert settings.rank(3) == 0  # a setting that is wrong harms no engine


def test_figures_have_a_subject_of_their_own() -> None:
    assert figures_subject("ns", WorkerRank("10.0.0.1:8000", 2)) == "kv.ns.figures.10%2e0%2e0%2e1%3a8000.2"


def test_the_plug_in_sleeps_without_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_ROUTER_NATS", raising=False)
    register()
    assert "vllm" not in sys.modules


def test_the_plug_in_takes_the_place_of_zmq(monkeypatch: pytest.MonkeyPatch) -> None:
    class EventPublisher:
        def __init__(self, data_parallel_rank: int = 0) -> None:
            self.data_parallel_rank = data_parallel_rank

    class EventPublisherFactory:
        _registry: ClassVar[dict[str, type]] = {"zmq": EventPublisher}

    kv_events = types.ModuleType("vllm.distributed.kv_events")
    kv_events.__dict__.update(EventPublisher=EventPublisher, EventPublisherFactory=EventPublisherFactory)
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_events", kv_events)
    monkeypatch.setenv("KV_ROUTER_NATS", "nats://127.0.0.1:9")
    monkeypatch.setenv("KV_ROUTER_WORKER_ID", "w")
    monkeypatch.setenv("KV_ROUTER_FIRST_RANK", "1")
    register()
    register()
    publisher = EventPublisherFactory._registry["zmq"](data_parallel_rank=1, endpoint="tcp://*:5557", hwm=1)
    assert publisher.data_parallel_rank == 1
    assert publisher._thread._rank == WorkerRank("w", 0)
    publisher.publish(BATCH)
    publisher.shutdown()
    assert our_threads() == []


@pytest.mark.parametrize("names", [(), ("EventPublisher",), ("EventPublisher", "EventPublisherFactory")])
def test_a_vllm_in_which_the_plug_in_has_no_place_starts_without_it(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kv_events = types.ModuleType("vllm.distributed.kv_events")
    kv_events.__dict__.update({name: type(name, (), {}) for name in names})
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_events", kv_events)
    monkeypatch.setenv("KV_ROUTER_NATS", "nats://127.0.0.1:9")
    monkeypatch.setenv("KV_ROUTER_WORKER_ID", "w")
    register()
    assert caplog.messages == [UNKNOWN_VERSION]


def import_stat_logger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that only vLLM imports."""
    loggers = types.ModuleType("vllm.v1.metrics.loggers")
    loggers.__dict__["StatLoggerBase"] = type("StatLoggerBase", (), {})
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.loggers", loggers)
    monkeypatch.delitem(sys.modules, "publishers.vllm_stat_logger", raising=False)
    made = importlib.import_module("publishers.vllm_stat_logger")
    monkeypatch.delitem(sys.modules, "publishers.vllm_stat_logger")
    return made


def vllm_config(*, only_local: bool = False) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=404),
        parallel_config=SimpleNamespace(
            data_parallel_size=4,
            data_parallel_size_local=2,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=only_local,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )


def scheduler_stats() -> Any:
    cache = SimpleNamespace(queries=40, hits=10)
    return SimpleNamespace(num_waiting_reqs=1, num_running_reqs=2, kv_cache_usage=0.5, prefix_cache_stats=cache)


@pytest.mark.parametrize(("only_local", "blocks"), [(False, 101), (True, 202)])
def test_a_ranks_blocks_are_its_share_of_what_the_front_end_adds_up(
    monkeypatch: pytest.MonkeyPatch, only_local: bool, blocks: int
) -> None:
    monkeypatch.delenv("KV_ROUTER_NATS", raising=False)
    logger = import_stat_logger(monkeypatch).KVRouterStatLogger(vllm_config(only_local=only_local))
    figures = logger._figures(scheduler_stats())
    assert (figures.kv_total_blocks, figures.kv_active_blocks) == (blocks, round((blocks - 1) / 2))
    assert (figures.request_active_slots, figures.request_total_slots, figures.num_requests_waiting) == (2, 8, 1)
    assert figures.gpu_prefix_cache_hit_rate == 0.25
    assert figures.lora_total_slots is None


def test_how_many_adapters_run_at_once_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_ROUTER_NATS", raising=False)
    config = vllm_config()
    config.lora_config = SimpleNamespace(max_loras=4)
    logger = import_stat_logger(monkeypatch).KVRouterStatLogger(config)
    assert logger._figures(scheduler_stats()).lora_total_slots == 4


def test_figures_that_cannot_be_read_are_said_once_and_do_no_harm_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls this where it hands out answers, and ends that when it raises."""
    monkeypatch.setenv("KV_ROUTER_NATS", "nats://127.0.0.1:9")
    monkeypatch.setenv("KV_ROUTER_WORKER_ID", "w")
    made = import_stat_logger(monkeypatch)
    logger = made.KVRouterStatLogger(vllm_config())
    for _ in range(2):
        logger.record(SimpleNamespace(num_running_reqs=2), None, engine_idx=0)
    told = [record.getMessage() for record in caplog.records if record.name == made.__name__]
    assert told == [made.UNREADABLE]
    logger.record(scheduler_stats(), None)
    assert logger._thread._latest.load.request_active_slots == 2
    logger._thread.stop()
    assert our_threads() == []


def test_the_plug_in_brings_no_compiler_into_processes_that_publish_nothing() -> None:
    """vLLM 0.32 on a CPU fails to start a worker when llvmlite is loaded in it."""
    loaded = "import sys, publishers.vllm_plugin as p; p.register(); print('numba' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
