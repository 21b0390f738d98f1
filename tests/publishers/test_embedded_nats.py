"""The nats-server that goes with whoever started it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from publishers.embedded_nats import EmbeddedNatsPlane

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
        async with asyncio.timeout(10):
            await _end_of(server)
    except TimeoutError:
        signal.pidfd_send_signal(server, signal.SIGKILL)
        raise
    finally:
        os.close(server)


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
    plane = EmbeddedNatsPlane()
    came_back, told = asyncio.Event(), asyncio.Event()
    plane.on_reconnect(came_back.set)
    await plane.start()
    try:
        await plane.subscribe("kv.test", lambda _message: told.set())
        port, process = plane.server.port, plane.server._process
        assert process
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            await came_back.wait()
            plane.publish("kv.test", b"x")
            await told.wait()
        assert plane.server.port == port
        assert plane.server._process is not process
    finally:
        await plane.close()
