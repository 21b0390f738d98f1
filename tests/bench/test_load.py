"""The load generator, in front of whoever answers as it should not."""

from __future__ import annotations

import asyncio

from scripts.bench.load import Load, arguments


async def test_a_connection_that_was_closed_makes_errors_and_nobody_waits_for_it() -> None:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        flags = ["--connections", "3", "--warm-up", "0", "--seconds", "0", "--workload", "short"]
        outcome = await Load(arguments(["--url", f"http://127.0.0.1:{port}", *flags])).run()
    assert (outcome.requests, outcome.errors) == (0, 6), "each once in the warm-up, and once after it"
