"""`--processes`: one port, one set of books, and no process left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.children import PATIENCE, Child, Router, Sim, get, wait_for

pytestmark = pytest.mark.slow

BODY = {"model": "sim", "prompt": "hello", "stream": True}
ROOT = Path(__file__).resolve().parents[2]
TWO = ("--router-mode", "least-loaded", "--processes", "2")
UNTOLD = ("--router-mode", "kv", "--processes", "2", "--no-kv-events")


@pytest.fixture(scope="module")
def slow(logs: Path) -> Iterator[Sim]:
    """Four workers, 50 tokens a second for each request; what is given up there is gone at once."""
    with Sim("--base-s", "0.02", log=logs, workers=4) as sim:
        yield sim


@pytest.fixture(scope="module")
def untold(logs: Path) -> Iterator[Router]:
    """In front of engines that tell nothing of what was sent there. Each test sends what no other does."""
    with Sim(log=logs, workers=4) as sim, Router(sim.urls, *UNTOLD, log=logs) as router:
        yield router


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def served(router: Router) -> list[float]:
    """Requests that each process has begun, ended or not."""
    return [
        router.metric("router_requests_total", process=str(number))
        + router.metric("router_requests_in_flight", process=str(number))
        for number in range(2)
    ]


def both_served(router: Router, before: list[float]) -> bool:
    """Since then."""
    return all(now > then for now, then in zip(served(router), before, strict=True))


@contextlib.asynccontextmanager
async def streaming(router: Router, tokens: int) -> AsyncIterator[aiohttp.ClientResponse]:
    """Begun on a connection of its own."""
    async with (
        aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(PATIENCE)) as client,
        client.post("/v1/completions", json={**BODY, "max_tokens": tokens}) as answer,
    ):
        yield answer


async def stream(router: Router, stack: AsyncExitStack) -> str:
    """Never ends, and is given up when the stack unwinds; returns its worker."""
    answer = await stack.enter_async_context(streaming(router, 100_000))
    return answer.headers["x-router-worker"]


async def test_processes_agree_on_load_at_once(slow: Sim, logs: Path) -> None:
    """Streams that never end, each on a connection of its own: fewest requests in flight is exact only when all know
    of all."""
    with Router(slow.urls, *TWO, log=logs) as router:
        async with AsyncExitStack() as stack:
            # All through one process: one time in two thousand million.
            workers = Counter([await stream(router, stack) for _ in range(32)])
            assert workers == dict.fromkeys(slow.ids, 8)
            assert all(served(router))
            assert sum(served(router)) == 32
            for number in range(2):
                assert router.metric("router_load_requests", process=str(number)) == 32
        wait_for(router.is_at_rest)


TEXT = "One two three four. " * 500
PICTURED = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}, {"type": "text", "text": TEXT}]


async def ask(router: Router, path: str, body: object, status: int) -> tuple[str, bool]:
    """Over a connection of its own: the worker, and whether anything was expected there."""
    async with aiohttp.ClientSession(router.url) as client, client.post(path, json=body) as answer:
        assert answer.status == status
        return answer.headers["x-router-worker"], int(answer.headers["x-router-overlap-tokens"]) > 0


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PICTURED}]}),
    ],
    ids=["tokens", "stand-ins"],
)
async def test_processes_know_what_any_of_them_sent(untold: Router, path: str, prompt: dict[str, object]) -> None:
    """To engines that tell nothing of it."""
    body, before = {"model": "sim", "max_tokens": 1, **prompt}, served(untold)
    answers = []
    for _ in range(32):
        answers.append(await ask(untold, path, body, 200))
        wait_for(untold.is_at_rest)  # to a process that has not heard of its end yet, it is work ahead at its worker
    first, *others = answers
    assert both_served(untold, before)
    assert first[1] is False
    assert set(others) == {(first[0], True)}


async def test_processes_know_what_was_refused(untold: Router) -> None:
    body, before = {"model": "sim", "input": "Five six seven eight. " * 500}, served(untold)
    for _ in range(16):
        _, overlap = await ask(untold, "/v1/responses", body, 404)
        assert not overlap
        served(untold)  # whoever passed the refusal on has noted it by now: it is the first thing done then
    assert both_served(untold, before)


async def test_a_process_that_dies_is_replaced_and_its_bookings_are_void(slow: Sim, logs: Path) -> None:
    with Router(slow.urls[:2], *TWO, log=logs) as router:
        async with AsyncExitStack() as stack:
            for _ in range(16):
                await stream(router, stack)
            lost, left = served(router)
            assert lost
            killed = children(router.process.pid)[0]
            os.kill(killed, signal.SIGKILL)
            wait_for(lambda: len(children(router.process.pid)) == 2 and killed not in children(router.process.pid))
            wait_for(lambda: router.metric("router_worker_up", process="0") == 2)
            wait_for(lambda: router.metric("router_load_requests", process="1") == left)
            assert "A process has ended and is started again" in router.log
        wait_for(router.is_at_rest)


@pytest.mark.parametrize("watched", [False, True], ids=["at a hangup", "when the file changes"])
async def test_workers_join_and_leave_in_each_process(slow: Sim, logs: Path, tmp_path: Path, watched: bool) -> None:
    """And all still agree on load; a process that is started again knows who is there by then."""
    config = tmp_path / "router.yaml"
    arguments = [*TWO, "--config", str(config), *(["--watch-config"] if watched else [])]
    with contextlib.ExitStack() as stack:

        def say(*numbers: int) -> None:
            ready = tmp_path / "next.yaml"
            ready.write_text(f"worker: {[slow.urls[number] for number in numbers]}\n")
            ready.replace(config)

        def are_up(workers: int) -> bool:
            return all(router.metric("router_worker_up", process=number) == workers for number in "01")

        say(0, 1)
        router = stack.enter_context(Router([], *arguments, log=logs))
        assert are_up(2)
        assert await spread(router, 8) == {slow.ids[0]: 4, slow.ids[1]: 4}
        for numbers in ((0, 1, 2), (1, 2), (1, 2, 3)):
            say(*numbers)
            if not watched:
                router.process.send_signal(signal.SIGHUP)
            wait_for(partial(are_up, len(numbers)))
            assert await spread(router, 12) == {slow.ids[number]: 12 // len(numbers) for number in numbers}
        killed = children(router.process.pid)[0]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: len(children(router.process.pid)) == 2 and killed not in children(router.process.pid))
        wait_for(lambda: are_up(3))
        assert "they take a restart" not in router.log
        config.write_text(config.read_text() + "event_plane: nats://127.0.0.1:1\n")
        if not watched:
            router.process.send_signal(signal.SIGHUP)
        told = "they take a restart process={} settings=event_plane\n"
        wait_for(lambda: all(told.format(number) in router.log for number in "01"))
        assert "Traceback" not in router.log


async def spread(router: Router, streams: int) -> Counter[str]:
    """Who gets how many of so many streams at a time, each over a connection of its own; they are given up then."""
    async with AsyncExitStack() as stack:
        workers = Counter([await stream(router, stack) for _ in range(streams)])
    wait_for(router.is_at_rest)
    return workers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_end_with_the_parents_signal(logs: Path, number: signal.Signals) -> None:
    with Router(["http://127.0.0.1:1"], *TWO, "--slo-patience", "1", log=logs) as router:
        started = children(router.process.pid)
        assert len(started) == 2
        router.process.send_signal(number)
        assert router.ended() == 0
        assert router.log.count("A flag does nothing") == 1  # though each process reads it
        assert not any(map(alive, started))
        assert set(re.findall(r"Worker is not up process=(\d+) ", router.log)) == {"0", "1"}
        assert "Traceback" not in router.log


async def test_a_signal_that_each_process_gets_lets_streams_end(slow: Sim, logs: Path) -> None:
    """As from systemd; the parent passes on its own as well."""
    with Router(slow.urls, *TWO, log=logs) as router:
        async with AsyncExitStack() as stack:
            answers = [await stack.enter_async_context(streaming(router, 200)) for _ in range(8)]
            for child in children(router.process.pid):
                os.kill(child, signal.SIGTERM)
            wait_for(lambda: refuses(int(router.url.rpartition(":")[2])))
            router.process.terminate()
            for answer in answers:
                assert (await answer.content.read()).split()[-1] == b"[DONE]"
        assert router.ended() == 0
        assert "Second signal" not in router.log


async def test_a_second_signal_ends_all_at_once(slow: Sim, logs: Path) -> None:
    with Router(slow.urls, *TWO, log=logs) as router:
        async with streaming(router, 100_000) as answer:
            router.process.terminate()
            wait_for(lambda: refuses(int(router.url.rpartition(":")[2])))
            assert router.process.poll() is None
            router.process.terminate()
            with pytest.raises(aiohttp.ClientError):
                await answer.content.read()
        assert router.ended() == 0
        assert "Traceback" not in router.log


def test_what_lies_in_the_working_folder_is_not_run(tmp_path: Path) -> None:
    """The parent, as it is when installed, does not look there."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('of the working folder')")
    command = [sys.executable, "-P", "-m", "router", *TWO, "--port", "0", "--worker", "http://127.0.0.1:1"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout
        said = parent.stdout.readline()
        parent.terminate()
        told = parent.communicate(timeout=PATIENCE)[1]
    assert said.startswith(b"Listening on "), told
    assert parent.returncode == 0


def test_all_end_when_the_parent_is_killed(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Router(["http://127.0.0.1:1"], *TWO, log=logs) as router:
        started = children(router.process.pid)
        assert list(tmp_path.iterdir())
        router.process.kill()
        wait_for(lambda: not any(map(alive, started)))
        assert router.log.count("The parent process has ended") == 2
    assert not list(tmp_path.iterdir())


async def test_nothing_is_left_where_the_parent_is_killed_while_all_drain(
    slow: Sim, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Router(slow.urls, *TWO, log=logs) as router:
        started = children(router.process.pid)
        async with streaming(router, 100_000):
            router.process.terminate()
            wait_for(lambda: refuses(int(router.url.rpartition(":")[2])))
            router.process.kill()
            wait_for(lambda: not list(tmp_path.iterdir()))
        wait_for(lambda: not any(map(alive, started)))


def test_a_port_that_another_router_serves_is_not_joined(untold: Router, logs: Path) -> None:
    port = untold.url.rpartition(":")[2]
    with Child("router", "--worker", "http://127.0.0.1:1", "--port", port, *TWO, log=logs) as second:
        assert second.ended() == 1
        assert "in use" in second.log
    assert get(f"{untold.url}/health")[0] == 200


async def test_the_port_of_a_router_that_drains_is_free_for_another(slow: Sim, logs: Path) -> None:
    with Router(slow.urls, *TWO, log=logs) as first:
        async with AsyncExitStack() as stack:
            await stream(first, stack)
            port = first.url.rpartition(":")[2]
            first.process.terminate()
            wait_for(lambda: refuses(int(port)))
            with Child("router", "--worker", slow.urls[0], "--port", port, *TWO, log=logs) as second:
                assert second.first_line().startswith("Listening on ")
                assert first.process.poll() is None


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_in_use_is_said_in_one_line(logs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Child("router", "--worker", "http://127.0.0.1:1", "--port", port, *TWO, log=logs) as router:
            assert router.ended() == 1
            (sentence,) = router.log.splitlines()
    assert f"port={port}" in sentence
    assert "in use" in sentence


def test_an_embedded_nats_server_is_shared(logs: Path) -> None:
    with Router(["http://127.0.0.1:1"], *TWO, "--event-plane", "nats+embedded://", log=logs) as router:
        wait_for(lambda: router.metric("router_event_plane_connected") == 2)
        assert len(children(router.process.pid)) == 3
