"""The nats-server that goes with whoever started it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

import publishers.embedded_nats
from publishers.embedded_nats import OPEN, EmbeddedNatsPlane, NatsServer

pytestmark = pytest.mark.nats

_OWNER = """
import asyncio
from publishers.embedded_nats import NatsServer

async def main():
    server = NatsServer()
    await server.start()
    print(server._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a child that its parent is gone")
async def test_it_does_not_outlive_who_was_killed() -> None:
    """Else its port is taken when the router is started again, which then ends at once, each time."""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", _OWNER, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout
    server = os.pidfd_open(int(await owner.stdout.readline()))
    try:
        owner.kill()
        await owner.wait()
        async with asyncio.timeout(30):
            await _end_of(server)
    except TimeoutError:
        signal.pidfd_send_signal(server, signal.SIGKILL)
        raise
    finally:
        os.close(server)


@pytest.mark.parametrize(
    ("host", "open_to_all"), [("0.0.0.0", True), ("10.0.0.1", True), ("127.0.0.1", False), ("::1", False)]
)
async def test_a_server_that_others_reach_and_that_asks_for_no_key_is_warned_of(
    host: str, open_to_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = tmp_path / "nats-server"
    said = "echo Listening for client connections on x:4222 >&2; echo Server is ready >&2"
    stand_in.write_text(f"#!/bin/sh\n{said}; exec sleep 1000\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(publishers.embedded_nats, "nats_server_binary", lambda: stand_in)
    server = NatsServer(host)
    await server.start()
    await server.stop()
    assert (OPEN in caplog.text) is open_to_all


async def _end_of(pidfd: int) -> None:
    """Of the process, and not of a connection to it: it may take another for a moment after it closed one."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)


async def test_it_is_started_again_where_it_was() -> None:
    """Else a router whose event plane died goes on without events until somebody reads its log."""
    plane = EmbeddedNatsPlane(NatsServer())
    came_back, told = asyncio.Event(), asyncio.Event()
    plane.on_reconnect(came_back.set)
    await plane.start()
    try:
        await plane.subscribe("kv.test", lambda _message: told.set())
        port, process = plane.server.port, plane.server._process
        assert process
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await came_back.wait()
            plane.publish("kv.test", b"x")
            await told.wait()
        assert plane.server.port == port
        assert plane.server._process is not process
    finally:
        await plane.close()
