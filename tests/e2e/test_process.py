"""The router as a process: how it starts, how it refuses to, how it ends, and what a dying worker does to it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.e2e.children import PATIENCE, Child, Router, Sim, get, wait_for
from tests.fakes.reserved_port import ReservedPort

pytestmark = pytest.mark.slow

BODY = {"model": "sim", "prompt": "hello", "stream": True, "max_tokens": 100}


@pytest.fixture(scope="module")
def slow(logs: Path) -> Iterator[Sim]:
    """One worker, 50 tokens a second."""
    with Sim("--base-s", "0.02", log=logs, workers=1) as sim:
        yield sim


def refuses(url: str) -> bool:
    where = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((where.hostname, where.port)) != 0


def sockets_at(url: str) -> list[str]:
    """The kernel's lines for the sockets of this port, either end; not of those that only wait for late packets."""
    port, waiting = f":{urlsplit(url).port:04X}", "06"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [" ".join(line) for line in lines if port in line[1] + line[2] and line[3] != waiting]


@asynccontextmanager
async def streaming(router: Router, tokens: int) -> AsyncIterator[aiohttp.StreamReader]:
    """A stream of so many events whose first one has come."""
    async with (
        aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(PATIENCE)) as client,
        client.post("/v1/completions", json={**BODY, "max_tokens": tokens}) as answer,
    ):
        assert (await answer.content.readline()).startswith(b"data: {")
        yield answer.content


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_stream_end(slow: Sim, logs: Path, number: signal.Signals) -> None:
    with Router(slow.urls, "--router-mode", "round-robin", log=logs) as router:
        async with streaming(router, 100) as stream:
            router.process.send_signal(number)
            wait_for(lambda: refuses(router.url))
            assert router.process.poll() is None
            assert sockets_at(router.url)
            events = (await stream.read()).split()
            assert events.count(b"data:") == 100
            assert events[-1] == b"[DONE]"
        assert router.ended() == 0
        wait_for(lambda: not sockets_at(router.url))
        assert "Draining" in router.log
        assert router.log.endswith(" info    router Ended\n")
        assert "Traceback" not in router.log


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--router-mode", "kv"], "mode=kv policy=auto"),
        (["--kv-overlap-score-weight", "1"], "mode=kv policy=overlap"),
        (["--router-mode", "random"], "mode=random"),
    ],
)
def test_the_log_tells_what_serves(slow: Sim, logs: Path, arguments: list[str], told: str) -> None:
    with Router(slow.urls, *arguments, log=logs) as router:
        wait_for(lambda: "Serving" in router.log)
        (line,) = [line for line in router.log.splitlines() if "Serving" in line]
        assert " info " in line
        assert " version=" in line
        assert line.endswith(told)


async def test_a_second_signal_ends_at_once(slow: Sim, logs: Path) -> None:
    with Router(slow.urls, "--router-mode", "round-robin", log=logs) as router:
        async with streaming(router, 100_000) as stream:
            router.process.terminate()
            wait_for(lambda: refuses(router.url))
            assert router.process.poll() is None
            router.process.terminate()
            with pytest.raises(aiohttp.ClientError):
                await stream.read()
        assert router.ended() == 0
        assert "Second signal: ending at once in_flight=1" in router.log
        assert router.log.endswith(" info    router Ended\n")
        assert "Traceback" not in router.log
    wait_for(
        lambda: re.search(r"^vllm:num_requests_running\S* 0(\.0)?$", get(slow.urls[0] + "/metrics")[1], re.MULTILINE)
    )


async def test_streams_that_outlast_the_drain_timeout_are_cut(slow: Sim, logs: Path) -> None:
    with Router(slow.urls, "--router-mode", "round-robin", "--drain-timeout", "0.1", log=logs) as router:
        async with streaming(router, 100_000) as stream:
            router.process.terminate()
            assert b"--drain-timeout" in (await stream.read()).splitlines()[-3]
        assert router.ended() == 0
        assert "cut_off=1" in router.log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--router-mode", "best"], ["--router-mode", "round-robin", "'best'"]),
        (["--port", "99999"], ["--port", "65535"]),
        (["--nonsense", "1"], ["--nonsense"]),
        (["--worker", "ftp://x"], ["--worker", "'ftp://x'"]),
        (["--config", "/nowhere/x.yaml"], ["--config", "/nowhere/x.yaml"]),
    ],
)
def test_a_wrong_flag_is_named_in_one_sentence(logs: Path, arguments: list[str], words: list[str]) -> None:
    with Child("router", "--worker", "http://127.0.0.1:1", *arguments, log=logs) as router:
        assert router.ended() == 2
        (sentence,) = router.log.splitlines()
    assert all(word in sentence for word in words)


def test_a_port_in_use(slow: Sim, logs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Child("router", "--worker", slow.urls[0], "--port", port, log=logs) as router:
            assert router.ended() == 1
            (sentence,) = [line for line in router.log.splitlines() if " error " in line]
            assert f"port={port}" in sentence
            assert "in use" in sentence
            assert "Worker is up" not in router.log, "told before all else"
            assert "Traceback" not in router.log


def test_the_port_of_the_admin_surface_in_use(logs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ("--worker", "http://127.0.0.1:1", "--port", "0", "--admin-listen", address)
        with Child("router", *arguments, log=logs) as router:
            assert router.ended() == 1
            (sentence,) = [line for line in router.log.splitlines() if " error " in line]
            assert f"Cannot start: --admin-listen {address}" in sentence
            assert "in use" in sentence
            assert "port=" not in sentence, "the router's own is not the trouble"
            assert "Traceback" not in router.log


@pytest.mark.parametrize("processes", ["1", "2"])
def test_where_its_streams_lead_is_no_condition(slow: Sim, logs: Path, processes: str) -> None:
    arguments = ("--worker", slow.urls[0], "--port", "0", "--processes", processes)
    with Child("router", *arguments, log=logs, redirected=">/dev/full") as router:
        warning = r"(.*) warning publishers.streams .* reason=\"No space left .* line=\"Listening on (http://\S+)\"\n"
        said = wait_for(lambda: re.search(warning, router.log))
        assert said
        assert get(f"{said[2]}/health")[0] == 200
        router.process.terminate()
        assert router.ended() == 0
    assert "Traceback" not in router.log


def test_streams_that_are_closed_are_as_good_as_empty(logs: Path) -> None:
    """Sockets that get their numbers have the event loop end the process."""
    with socket.create_server(("127.0.0.1", 0)) as admin:
        address = f"127.0.0.1:{admin.getsockname()[1]}"  # taken, so that it ends of itself when it has looked at all
        arguments = ("--worker", "http://127.0.0.1:1", "--port", "0", "--admin-listen", address)
        with Child("router", *arguments, log=logs, redirected="<&- >&- 2>&-") as router:
            assert router.ended() == 1


@pytest.mark.parametrize("processes", ["1", "2"])
def test_what_reading_the_settings_warns_of_is_a_line_of_the_log(logs: Path, processes: str) -> None:
    arguments = ("--worker", "http://127.0.0.1:1", "--host", "a..b", "--log-format", "json", "--processes", processes)
    with Child("router", *arguments, log=logs, variables={"ROUTER_FOO": "1"}) as router:
        assert router.ended() == 1
        warning, error = map(json.loads, router.log.splitlines())
        assert (warning["level"], "ROUTER_FOO" in warning["message"]) == ("warning", True)
        assert error["level"] == "error"
    with Child("router", *arguments, "--log-level", "error", log=logs, variables={"ROUTER_FOO": "1"}) as router:
        assert router.ended() == 1
        assert "ROUTER_FOO" not in router.log


def test_a_flag_that_does_nothing_in_its_mode_is_told(logs: Path) -> None:
    arguments = ("--worker", "http://127.0.0.1:1", "--host", "a..b", "--router-mode", "random", "--kv-policy", "ttft")
    with Child("router", *arguments, log=logs) as router:
        assert router.ended() == 1
        (warning,) = [line for line in router.log.splitlines() if " warning " in line]
        assert warning.endswith("only --router-mode kv heeds it flag=--kv-policy router_mode=random")


def test_settings_that_cannot_be_used_are_told_with_what_reading_them_warned_of(logs: Path) -> None:
    with Child("router", log=logs, variables={"ROUTER_WORKERS": "http://127.0.0.1:1"}) as router:
        assert router.ended() == 2
        warning, error = router.log.splitlines()
        assert "did you mean ROUTER_WORKER?" in warning
        assert error.startswith("kv-router: There is no worker")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_pipe_of_keys_is_called_so(logs: Path, tmp_path: Path, processes: str) -> None:
    """As from a shell's `<(…)`, which its further processes do not find there."""
    os.mkfifo(tmp_path / "keys")
    arguments = ("--worker", "http://127.0.0.1:1", "--api-keys", "/dev/fd/5", "--processes", processes)
    with Child("router", *arguments, log=logs, redirected=f"5<>'{tmp_path}/keys'") as router:
        assert router.ended() == 2
        assert router.log == "kv-router: --api-keys: /dev/fd/5 is a pipe, and is read more than once; name a file.\n"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_host_whose_name_none_can_be(logs: Path, processes: str) -> None:
    arguments = ("--worker", "http://127.0.0.1:1", "--host", "a..b", "--processes", processes)
    with Child("router", *arguments, log=logs) as router:
        assert router.ended() == 1
        (sentence,) = [line for line in router.log.splitlines() if " error " in line]
        assert "Cannot listen" in sentence
        assert "Traceback" not in router.log


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_port_of_an_embedded_nats_server_in_use(logs: Path, processes: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        plane = f"nats+embedded://127.0.0.1:{taken.getsockname()[1]}"
        arguments = ("--worker", "http://127.0.0.1:1", "--event-plane", plane, "--processes", processes)
        with Child("router", *arguments, log=logs) as router:
            assert router.ended() == 1
            (sentence,) = [line for line in router.log.splitlines() if " error " in line]
            assert "Cannot start: nats-server" in sentence
            assert "in use" in sentence
            assert "Traceback" not in router.log


def test_the_port_goes_to_its_own_nats_server(logs: Path) -> None:
    """Which is only seen when all is ready: the system's words then, and the address once."""
    reserved = ReservedPort()
    port = str(reserved.number)
    arguments = ("--worker", "http://127.0.0.1:1", "--port", port, "--event-plane", f"nats+embedded://127.0.0.1:{port}")
    with closing(reserved), Child("router", *arguments, log=logs) as router:
        assert router.ended() == 1
        (sentence,) = [line for line in router.log.splitlines() if " error " in line]
        assert sentence.endswith(f" router Cannot listen: Address already in use host=127.0.0.1 port={port}")


def test_no_worker_is_there_yet(logs: Path) -> None:
    """The router starts all the same, and says why it cannot serve."""
    with Router(["http://127.0.0.1:1"], log=logs) as router:
        assert get(f"{router.url}/health")[0] == 200
        status, body = get(f"{router.url}/v1/files")
        assert (status, json.loads(body)["error"]["type"]) == (503, "server_error")
        assert get(f"{router.url}/ready")[0] == 503
        assert router.ready()["127.0.0.1:1"]["trouble"] == "cannot be reached: Connection refused"


async def test_a_worker_is_killed_under_load(slow: Sim, logs: Path) -> None:
    """Every stream ends whole or with an error event, properly; the other worker takes what comes after."""
    with (
        Sim("--base-s", "0.02", log=logs, workers=1) as doomed,
        Router(doomed.urls + slow.urls, "--router-mode", "round-robin", log=logs) as router,
    ):
        async with aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(PATIENCE)) as client:
            begun = asyncio.Semaphore(0)
            asked = [asyncio.ensure_future(_stream(client, begun)) for _ in range(20)]
            for _ in range(20):
                await begun.acquire()
            doomed.process.kill()
            asked += [asyncio.ensure_future(_stream(client, begun)) for _ in range(20)]
            endings = await asyncio.gather(*asked)
            workers = [worker for worker, _ in endings]
            assert [end for worker, end in endings if worker == doomed.ids[0]] == ["error"] * 10
            assert [end for worker, end in endings if worker == slow.ids[0]] == ["whole"] * 30
            assert len(workers) == 40
        wait_for(lambda: not router.ready()[doomed.ids[0]]["up"])
        wait_for(router.is_at_rest)
        assert "Traceback" not in router.log


async def _stream(client: aiohttp.ClientSession, begun: asyncio.Semaphore) -> tuple[str, str]:
    """(worker, how it ended)"""
    async with client.post("/v1/completions", json=BODY) as answer:
        assert answer.status == 200
        events = []
        async for line in answer.content:
            if line.strip():
                events.append(line.strip())
                if len(events) == 1:
                    begun.release()
    broken = events[-1] == b"event: error" and events.pop()
    assert all(event.startswith(b"data: ") for event in events)
    if not broken:
        assert (events[-1], len(events)) == (b"data: [DONE]", 101)
        return answer.headers["x-router-worker"], "whole"
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == 502
    return answer.headers["x-router-worker"], "error"


async def test_a_hangup_reads_roles_again(slow: Sim, logs: Path, tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"

    def say(role: str, timeout: int = 60) -> None:
        worker = f"{slow.urls[0]},name=a,role={role},connector=nixl"
        config.write_text(f"pd_timeout: {timeout}\nworker: ['{worker}']\n")

    say("both")
    with Router([], "--config", str(config), log=logs) as router:
        asked = {"model": "sim", "prompt": "hi", "max_tokens": 1}
        async with aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(PATIENCE)) as client:
            assert (await client.post("/v1/completions", json=asked)).status == 200
            say("decode")
            router.process.send_signal(signal.SIGHUP)
            wait_for(lambda: "Settings read again" in router.log)
            refused = await client.post("/v1/completions", json=asked)
            assert refused.status == 503
            assert "no prefill worker is up" in await refused.text()
            assert "they take a restart" not in router.log
            config.write_text("worker: [nonsense]\n")
            router.process.send_signal(signal.SIGHUP)
            wait_for(lambda: "The settings stay as they are" in router.log)
            say("both", timeout=1)
            router.process.send_signal(signal.SIGHUP)
            wait_for(lambda: "they take a restart" in router.log)
            assert (await client.post("/v1/completions", json=asked)).status == 200
        assert "Traceback" not in router.log
