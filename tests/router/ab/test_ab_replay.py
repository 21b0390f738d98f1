from __future__ import annotations

import asyncio
import json
from functools import partial

from router.ab.client import Outcome, send
from router.ab.replay import Pace, Prompts, Send, replay
from router.ab.trace import Row

from .conftest import Answer, Serve
from .streams import DONE, chunked, plain, token, usage

PROMPTS = Prompts("m")
OK = chunked(token(), token(), usage(8, 4, 2), DONE)


def rows(*timestamps: float) -> list[Row]:
    return [Row(at, 8, 2, (index,)) for index, at in enumerate(timestamps)]


async def sending(serve: Serve, answer: Answer) -> Send:
    return partial(send, await serve(answer), timeout=20)


def test_pace() -> None:
    assert Pace(rate=2, speedup=4).wall(8000) == 1.0


async def test_a_late_answer_delays_no_arrival(serve: Serve) -> None:
    """The first request is answered only once the third has arrived: a closed loop would wait for ever."""
    arrived: list[bytes] = []
    third = asyncio.Event()

    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        arrived.append(body)
        if len(arrived) == 3:
            third.set()
        await third.wait()
        writer.write(OK)
        await writer.drain()

    done: list[Outcome] = []
    records = await replay(rows(0, 1, 2), [await sending(serve, answer)], Pace(), PROMPTS, done.append)
    assert [one.error for one in records] == ["", "", ""]
    assert len(done) == 3


async def test_records_keep_the_order_of_rows_and_their_times(serve: Serve) -> None:
    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()

    records = await replay(rows(5000, 5010, 5030), [await sending(serve, answer)], Pace(rate=2, speedup=10), PROMPTS)
    assert [one.index for one in records] == [0, 1, 2]
    assert [round(one.at, 6) for one in records] == [0.0, 0.005, 0.015]
    assert all(one.lag >= 0 for one in records)


async def test_rows_go_round_the_targets_with_their_own_prompts(serve: Serve) -> None:
    prompts: dict[str, list[object]] = {"a": [], "b": []}

    async def target(name: str) -> Send:
        async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
            prompts[name].append(tuple(json.loads(body)["prompt"]))
            writer.write(OK)
            await writer.drain()

        return await sending(serve, answer)

    targets = [await target("a"), await target("b")]
    await replay(rows(0, 0, 0, 0), targets, Pace(), PROMPTS)
    assert [len(prompts[name]) for name in "ab"] == [2, 2]
    assert len({*prompts["a"], *prompts["b"]}) == 4


async def test_failures_are_records_and_stop_nothing(serve: Serve) -> None:
    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(b"429 Too Many Requests", b"slow down"))
        await writer.drain()

    records = await replay(rows(0, 0), [await sending(serve, answer)], Pace(), PROMPTS)
    assert [one.error for one in records] == ["status 429: slow down"] * 2
    assert [one.ttft for one in records] == [None, None]
