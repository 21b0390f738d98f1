from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.problems import blocks_of_another_size
from indexer.events import EventBatch, LoadReport, Stored, decode_batch, decode_load, unpack_hashes
from publishers.__main__ import main
from publishers.cli import Options, make_parser, parse
from publishers.embedded_nats import NatsServer, NatsServerError
from publishers.logs import configure_logging, log_event
from publishers.nats_plane import NatsPlane
from publishers.plane import all_events, all_loads
from tests.fakes.http_engine import HttpEngine, running
from tests.fakes.waiting import until
from tests.fakes.zmq_engine import BLOCK_SIZE, FakeEngine, stored
from tests.nats_fixture import nats_server

__all__ = ["nats_server"]

GIVEN = ["--engine", "http://10.0.0.1:8000/", "--nats", "nats://nats"]


def test_what_is_not_given_has_defaults() -> None:
    assert parse(GIVEN) == Options(
        engine="http://10.0.0.1:8000",
        nats="nats://nats",
        worker_id="10.0.0.1:8000",
        namespace="default",
        events=None,
        replay=None,
        block_size=None,
        load_interval=1.0,
        log_level="info",
        log_format="text",
    )


@pytest.mark.parametrize(
    ("engine", "worker_id"),
    [("http://h", "h:80"), ("https://h", "h:443"), ("http://[::1]:8000", "[::1]:8000"), ("http://H:1/v0", "h:1")],
)
def test_a_worker_is_named_after_its_engine(engine: str, worker_id: str) -> None:
    assert parse([*GIVEN, "--engine", engine]).worker_id == worker_id


@pytest.mark.parametrize("flag", ["--worker-api-key-file", "--worker-key", "--nats-creds", "--nats-nkey-seed"])
def test_a_pipe_that_would_be_empty_when_it_is_read_again(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main([*GIVEN, flag, str(pipe)]) == 2
    says = f"{flag}: {pipe} is a pipe, and is read more than once; name a file."
    assert capsys.readouterr().err == f"kv-publisher: {says}\n"


@pytest.mark.parametrize(
    ("flag", "value", "takes"),
    [
        ("--engine", "10.0.0.1:8000", "an address such as http://127.0.0.1:8000"),
        ("--engine", "http://h:port", "an address"),
        ("--engine", "http://[::1]8000", "an address"),
        ("--engine", "http://user@h", "an address"),
        ("--engine", "http://h:8000/v1", "http://127.0.0.1:8000, without /v1"),
        ("--engine", "http://h:8000/base/v1/", "without /v1"),
        ("--nats", "local", "nats://"),
        ("--nats", "http://nats", "nats://"),
        ("--events", "5557", "a ZMQ endpoint such as tcp://HOST:5557"),
        ("--events", "tcp://h:99999", "a ZMQ endpoint"),
        ("--events", "tcp://h", "a ZMQ endpoint"),
        ("--replay", "udp://h:1", "a ZMQ endpoint"),
        ("--event-host", "http://x", "a host's name or address such as 10.0.0.7"),
        ("--event-host", "10.0.0.7:5557", "without http:// or a port"),
        ("--block-size", "0", "a positive whole number"),
        ("--block-size", "x", "a positive whole number"),
        ("--load-interval", "0", "a positive number of seconds"),
        ("--load-interval", "inf", "a positive number of seconds"),
        ("--load-interval", "nan", "a positive number of seconds"),
        ("--namespace", "a.b", "letters, digits"),
        ("--worker-id", "a b", "the worker's name in the router"),
        ("--worker-id", "http://gpu-1:8000", "the worker's name in the router"),
        ("--worker-id", "", "the worker's name in the router"),
        ("--log-level", "loud", "invalid choice"),
        ("--log-format", "xml", "invalid choice"),
    ],
)
def test_a_wrong_value_names_its_flag_and_what_it_takes(
    flag: str, value: str, takes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*GIVEN, flag, value])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kv-publisher: argument {flag}: ")
    assert takes in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("endpoint", ["tcp://h:1", "tcp://*:5557", "tcp://[::1]:65535", "ipc:///run/kv"])
def test_endpoints_that_can_be_used(endpoint: str) -> None:
    assert parse([*GIVEN, "--events", endpoint, "--replay", endpoint]).events == endpoint


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--nats", "nats://user:secret@h:port"),
        ("--engine", "http://user:secret@h:8000"),
        ("--engine", "http://:secret@[::1]8000"),
    ],
)
def test_a_password_is_not_repeated(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*GIVEN, flag, value])
    assert "secret" not in capsys.readouterr().err


def test_the_version_says_of_what(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        parse(["--version"])
    assert re.match(r"kv-publisher (\d|\(run from a checkout)", capsys.readouterr().out)


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for group in ("General", "Engine", "Event plane", "Logs"):
        assert f"\n{group}:" in text
    for action in make_parser()._actions:
        assert action.help
        assert all(option in text for option in action.option_strings)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:], root.level = handlers, level


def test_logs_are_lines_for_people_or_machines(root_logger: logging.Logger) -> None:
    for log_format, expected in (
        ("text", r'\S+Z warning publishers\.x Gone worker=w#0 error="a b\\nc"\n'),
        ("json", r'\{"time": .*"message": "Gone", "worker": "w#0", "error": "a b\\nc"\}\n'),
    ):
        stream = io.StringIO()
        configure_logging("info", log_format, stream)
        log_event(logging.getLogger("publishers.x"), logging.WARNING, "Gone", worker="w#0", error="a b\nc")
        log_event(logging.getLogger("publishers.x"), logging.DEBUG, "Not shown")
        assert re.fullmatch(expected, stream.getvalue())


def missing() -> None:
    raise NatsServerError("no nats-server")


@pytest.mark.nats
def test_a_server_that_cannot_be_started_is_said(
    monkeypatch: pytest.MonkeyPatch, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("publishers.embedded_nats.nats_server_binary", missing)
    assert main([*GIVEN, "--nats", "nats+embedded://"]) == 1
    assert "no nats-server" in capsys.readouterr().err


@pytest.mark.nats
def test_a_start_that_takes_long_is_explained_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, root_logger: logging.Logger
) -> None:
    told = threading.Event()
    heard: list[bool] = []
    monkeypatch.setattr("publishers.compiling.PATIENCE", 0.0)
    monkeypatch.setattr("publishers.compiling._log_why", told.set)
    monkeypatch.setattr("publishers.process.warm_up", lambda: heard.append(told.wait(10)))
    monkeypatch.setattr("publishers.embedded_nats.nats_server_binary", missing)
    assert main([*GIVEN, "--nats", "nats+embedded://"]) == 1
    assert heard == [True]


@pytest.mark.slow
@pytest.mark.nats
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_publishes_and_ends_in_order(nats_server: NatsServer, number: signal.Signals) -> None:
    batches: list[EventBatch] = []
    reports: list[LoadReport] = []
    plane = NatsPlane([nats_server.url])
    await plane.start()
    await plane.subscribe(all_events("ns"), lambda payload: batches.append(decode_batch(payload)))
    await plane.subscribe(all_loads("ns"), lambda payload: reports.append(decode_load(payload)))
    of_no_kind = HttpEngine({"/health": (404, b"")})
    async with FakeEngine() as engine, running(of_no_kind) as http:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-m", "publishers", "--log-format", "json", "--namespace", "ns"),
            *("--engine", http.url, "--nats", nats_server.url, "--load-interval", "0.05"),
            *("--events", engine.source.endpoint, "--replay", engine.source.replay or "", "--worker-id", "w.1"),
            *("--block-size", str(2 * BLOCK_SIZE)),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await engine.subscribed()
            await engine.publish(stored(7777, 8888))
            await until(lambda: batches and reports and reports[-1].event_id == 0)
            process.send_signal(number)
            _, said = await asyncio.wait_for(process.communicate(), 30)
        finally:
            if process.returncode is None:
                process.kill()
    await plane.close()
    assert process.returncode == 0, said.decode()
    assert batches[0].rank == ("w.1", 0)
    assert [len(unpack_hashes(event.hashes)) for event in batches[0].events if isinstance(event, Stored)] == [2]
    lines = [json.loads(line) for line in said.splitlines()]
    assert blocks_of_another_size(2 * BLOCK_SIZE, BLOCK_SIZE) in [line["message"] for line in lines]
    assert [line["message"] for line in lines if line["level"] != "warning"][-3:] == [
        "Connected to NATS",
        "Publishing",
        "Ended",
    ]
    assert b"7777" not in said
