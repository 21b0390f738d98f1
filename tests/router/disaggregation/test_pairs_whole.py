"""Requests served in two parts by a whole router: the client sees one worker's answer, and the wire is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engines.sim.fleets import events
from tests.router.disaggregation.fleets import (
    CHAT,
    CONNECTORS,
    PROMPT,
    TEXT,
    alone,
    fleet,
    streamed_text,
    text_of,
)

MESSAGES = [{"role": "user", "content": "a question that fills more than one block"}]
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"model": "sim", "prompt": PROMPT, "max_tokens": 6},
    CHAT: {"model": "sim", "messages": MESSAGES, "max_tokens": 6},
}


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_two_workers_answer_as_one(connector: str, stream: bool, path: str) -> None:
    body = BODIES[path] | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    expected = await alone(connector, body, path)
    async with fleet(connector) as pair:
        cached = []
        for _ in range(3):
            status, answer = await pair.post(body, path)
            assert status == 200, answer
            if stream:
                *told, last, done = events(answer.encode())
                assert (done, streamed_text([*told, last])) == ("[DONE]", expected)
                usage = last["usage"]
            else:
                assert text_of(answer) == expected
                usage = answer["usage"]
            assert usage["completion_tokens"] == 6
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        size = usage["prompt_tokens"]
        held = (size - 1) // 16 * 16
        assert cached == [0, held, held], "what the prefill worker found cached"
        assert pair.failures() == {}
        assert pair.router.total("router_pd_requests_total") == 3
        prefill, decode = (pair.worker(name).ranks[0].scheduler.counters for name in ("p0", "d0"))
        assert prefill.prefill_tokens == size + 2 * (size - held)
        assert decode.transferred_tokens > 0
        assert pair.router.samples("router_reported_cached_tokens_total") == {"p0": 2.0 * held}


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_an_answer_of_one_token(connector: str) -> None:
    body = BODIES[TEXT] | {"max_tokens": 1}
    expected = await alone(connector, body)
    async with fleet(connector) as pair:
        for _ in range(5):
            status, answer = await pair.post(body)
            assert (status, text_of(answer)) == (200, expected)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached in {0, 32}, "never the whole prompt, which no prefill finds cached"


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_many_at_once(connector: str) -> None:
    bodies = [BODIES[TEXT] | {"prompt": [*PROMPT, number], "max_tokens": 1 + number % 7} for number in range(24)]
    expected = await asyncio.gather(*(alone(connector, body) for body in bodies[:3]))
    async with fleet(connector, prefills=2, decodes=2) as pair:
        answers = await asyncio.gather(*(pair.post(body) for body in bodies))
        assert [status for status, _ in answers] == [200] * 24
        assert [text_of(answer) for _, answer in answers[:3]] == expected
        assert pair.failures() == {}
