"""The load generator, in front of whoever answers as it should not."""

from __future__ import annotations

import asyncio
import json

import pytest

from scripts.bench.fake_worker import _STREAM, _STREAM_HEAD, Serving, Worker
from scripts.bench.load import Load, Outcome, arguments


class Listening(Worker):
    """Keeps the prompts that it is sent."""

    def __init__(self) -> None:
        super().__init__("/bench", step=0.0, cache=None)
        self.prompts: list[str] = []

    def answer(self, method: bytes, path: bytes, body: bytes, transport: asyncio.Transport) -> None:
        self.prompts.append(json.loads(body)["prompt"])
        super().answer(method, path, body, transport)


async def _outcome(worker: Worker, workload: str, connections: int, seed: int) -> Outcome:
    """Of two requests of each connection, the first one to warm up."""
    ends: list[Serving] = []

    def serve() -> Serving:
        ends.append(Serving(worker))
        return ends[-1]

    server = await asyncio.get_running_loop().create_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        flags = ["--warm-up", "0", "--seconds", "0", "--workload", workload]
        flags += ["--connections", str(connections), "--seed", str(seed), "--url", url]
        outcome = await Load(arguments(flags)).run()
        for each in ends:
            each._transport.abort()
        await asyncio.sleep(0)  # by then both sides' are closed
    return outcome


async def _prompts(workload: str, connections: int, seed: int) -> list[str]:
    worker = Listening()
    await _outcome(worker, workload, connections, seed)
    return worker.prompts


async def test_no_load_in_front_of_a_router_repeats_prompts_of_another() -> None:
    first = await _prompts("short", 2, seed=0)
    assert len(first) == 4
    assert sorted(first) == sorted(await _prompts("short", 2, seed=0)), "each router gets the same"
    others = [("short", 2, 1), ("short", 3, 0), ("stream", 2, 0), ("long", 2, 0)]
    beginnings = [prompt[:400] for load in others for prompt in await _prompts(*load)]
    assert len({*first, *beginnings}) == len(first) + len(beginnings)


class CuttingShort(Worker):
    """Says that all is well and ends a stream after its first chunk."""

    def answer(self, method: bytes, path: bytes, body: bytes, transport: asyncio.Transport) -> None:
        transport.write(_STREAM_HEAD + _STREAM[False][0] + _STREAM[False][-1])


@pytest.mark.parametrize(("kind", "errors"), [(CuttingShort, 2), (Worker, 0)])
async def test_an_answer_that_was_cut_short_is_an_error(kind: type[Worker], errors: int) -> None:
    outcome = await _outcome(kind("/bench", 0.0, None), "stream", 2, seed=0)
    assert (outcome.requests, outcome.errors) == (2, errors)


async def test_a_connection_that_was_closed_makes_errors_and_nobody_waits_for_it() -> None:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        flags = ["--connections", "3", "--warm-up", "0", "--seconds", "0", "--workload", "short"]
        outcome = await Load(arguments(["--url", f"http://127.0.0.1:{port}", *flags])).run()
    assert (outcome.requests, outcome.errors) == (0, 6), "each once in the warm-up, and once after it"
