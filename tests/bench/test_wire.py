"""Workloads, the fake worker's HTTP and its KV events."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from engines.events import BlockRemoved, BlockStored
from engines.sim.cache import Removed, Stored
from engines.vllm.decode import decode
from indexer.types import PLAIN, Tier
from scripts.bench.answer_reader import AnswerReader
from scripts.bench.fake_worker import chunk, take_request, whole
from scripts.bench.prompt_cache import BLOCK_SIZE, encode_events
from scripts.bench.workloads import WORKLOADS
from tests.engines.plain import plain_batch

TEXT = [f"line {number} of some text to draw prompts from" for number in range(500)]


@pytest.mark.parametrize(("workload", "size"), [("short", 400), ("stream", 400), ("long", 40_000)])
def test_prompts_have_their_size_and_differ(workload: str, size: int) -> None:
    bodies = WORKLOADS[workload].bodies(random.Random(1), TEXT)
    prompts = [json.loads(body)["prompt"] for body in itertools.islice(bodies, 5)]
    assert [len(prompt) for prompt in prompts] == [size] * 5
    assert len(set(prompts)) == 5


def test_a_conversation_grows_by_repeating_itself_and_then_another_begins() -> None:
    bodies = WORKLOADS["chat"].bodies(random.Random(1), TEXT)
    turns = [json.loads(body)["messages"] for body in itertools.islice(bodies, 21)]
    for before, after in itertools.pairwise(turns[:20]):
        assert after[: len(before)] == before
        assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]
    sizes = [sum(len(message["content"]) for message in turn) for turn in turns]
    assert sizes[0] == sizes[20] == 20_000
    assert sizes[19] == 58_000
    assert turns[20] != turns[0]


def test_requests_are_taken_whole_however_they_arrive() -> None:
    sent = b"POST /v1/completions?x=1 HTTP/1.1\r\nContent-Length: 4\r\nhost: a\r\n\r\nbodyGET /health HTTP/1.1\r\n\r\n"
    buffer, taken = bytearray(), []
    for byte in sent:
        buffer.append(byte)
        if request := take_request(buffer):
            taken.append(request)
    assert taken == [(b"POST", b"/v1/completions", b"body"), (b"GET", b"/health", b"")]
    assert not buffer


def test_the_end_of_answers_is_found_in_both_framings() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    stream = head + chunk(b"one") + chunk(b"[DONE]") + b"0\r\n\r\n"
    refused = whole(b"404 Not Found", b"text/plain", b"no")
    reader = AnswerReader()
    found = [status for byte in stream + refused if (status := reader.feed(bytes([byte]))) is not None]
    assert found == [200, 404]


def test_events_are_what_vllm_says() -> None:
    tokens = list(range(2 * BLOCK_SIZE))
    batch = plain_batch(decode(encode_events([Stored([11, 12], 10, tokens, PLAIN), Removed([7, 8])])))
    assert batch.events == [
        BlockStored([11, 12], 10, tokens, BLOCK_SIZE, Tier.GPU),
        BlockRemoved([7], Tier.GPU),
        BlockRemoved([8], Tier.GPU),
    ]
    assert not batch.skipped
