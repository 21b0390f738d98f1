"""OpenAI's own client against a router as its user starts it, and where repeated prompts go."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.children import Child, Router, Sim, wait_for

pytestmark = pytest.mark.slow

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What does a prefix cache keep? Grüße, 世界"},
]

BY_OVERLAP = ("--router-mode", "kv", "--kv-policy", "overlap")
"""Costs in tokens: in seconds, a busy machine makes a worker look slow for a moment, and a prompt that takes a few
milliseconds to compute rightly goes elsewhere."""


@contextmanager
def client_of(router: Router) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{router.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def router(fleet: Sim, logs: Path) -> Iterator[Router]:
    with Router(fleet.urls, *BY_OVERLAP, log=logs) as router:
        router.until_view("exact")
        yield router


@pytest.fixture
def client(router: Router) -> Iterator[OpenAI]:
    with client_of(router) as client:
        yield client


def a_prompt(tokens: int) -> str:
    """Never seen before; the fleet makes one token of each byte."""
    return (uuid.uuid4().hex * 100)[:tokens]


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["sim"]


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=5)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_chat_streamed(client: OpenAI) -> None:
    with client.chat.completions.create(
        model="sim", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) == 5
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="sim", prompt="hello", max_tokens=5)
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_completion_streamed(client: OpenAI) -> None:
    with client.completions.create(model="sim", prompt="hello", max_tokens=5, stream=True) as stream:
        chunks = list(stream)
    assert len([chunk for chunk in chunks if chunk.choices[0].text]) == 5
    assert chunks[-1].choices[0].finish_reason == "length"


def test_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_a_prompt_that_is_too_long(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model="sim", prompt="x" * 140_000)
    assert caught.value.code == "context_length_exceeded"


def ask(client: OpenAI, prompt: str, worker: str | None = None) -> tuple[str, int, int]:
    """(worker, overlap that the router expected, tokens that the engine had)"""
    headers = {"X-Router-Target-Worker": worker} if worker else {}
    answer = client.completions.with_raw_response.create(
        model="sim", prompt=prompt, max_tokens=2, extra_headers=headers
    )
    usage = answer.parse().usage
    assert usage is not None
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details else 0) or 0
    return answer.headers["x-router-worker"], int(answer.headers["x-router-overlap-tokens"]), cached


def assert_repeats_are_foreseen(router: Router, client: OpenAI, by_events: bool = True) -> None:
    """A prompt goes where it was, and the router knows what the engine has of it."""
    for number, tokens in enumerate((100, 333, 1001, 500)):
        worker = sorted(router.ready())[number % 2]
        prompt = a_prompt(tokens)
        blocks = router.blocks(worker) + tokens // 16
        assert ask(client, prompt, worker) == (worker, 0, 0)
        if by_events:
            wait_for(partial(router.blocks, worker), blocks.__le__)
        for repeated in (prompt, prompt + a_prompt(50)):
            wait_for(router.is_at_rest)  # an engine's report may still count a request that has just ended
            assert ask(client, repeated) == (worker, tokens // 16 * 16, tokens // 16 * 16)


def test_a_repeated_prompt_goes_where_it_was(router: Router, client: OpenAI) -> None:
    assert_repeats_are_foreseen(router, client)


def test_a_repeated_prompt_of_whole_blocks(router: Router, client: OpenAI) -> None:
    """An engine computes at least the last token again, and with it the last block."""
    prompt = a_prompt(160)
    worker = min(router.ready())
    blocks = router.blocks(worker) + 10
    ask(client, prompt, worker)
    wait_for(partial(router.blocks, worker), blocks.__le__)
    wait_for(router.is_at_rest)
    repeated, overlap, cached = ask(client, prompt)
    assert repeated == worker
    assert overlap > 0
    assert abs(overlap - cached) <= 16


def test_without_events_it_goes_where_it_was_sent(fleet: Sim, logs: Path) -> None:
    with (
        Router(fleet.urls, *BY_OVERLAP, "--no-kv-events", log=logs) as router,
        client_of(router) as client,
    ):
        router.until_view("blind")
        ranks = [rank for worker in router.ready().values() for rank in worker["ranks"]]
        assert [rank["routed"] for rank in ranks] == ["by assumption"] * 2
        assert_repeats_are_foreseen(router, client, by_events=False)


@pytest.mark.nats
def test_with_publishers_and_an_embedded_nats_server(fleet: Sim, logs: Path) -> None:
    with Router(fleet.urls, *BY_OVERLAP, "--event-plane", "nats+embedded://", log=logs) as router:
        nats = wait_for(
            lambda: [line.split("server=")[1] for line in router.log.splitlines() if "server=nats:" in line]
        )
        with (
            Child("publishers", "--engine", fleet.urls[0], "--nats", nats[0], log=logs),
            Child("publishers", "--engine", fleet.urls[1], "--nats", nats[0], log=logs),
            client_of(router) as client,
        ):
            router.until_view("exact")
            assert_repeats_are_foreseen(router, client)
