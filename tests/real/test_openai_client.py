"""OpenAI's own client finds what it expects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import NotFoundError, OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from .fleet import Router

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

PROMPT = "What does a prefix cache keep?"
MESSAGE: ChatCompletionUserMessageParam = {"role": "user", "content": PROMPT}
TOKENS = 5
EXACT_LENGTH = {"ignore_eos": True}


@pytest.fixture
def client(local_router: Router) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{local_router.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[MESSAGE], max_tokens=TOKENS, extra_body=EXACT_LENGTH
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == TOKENS


def test_chat_streamed(client: OpenAI) -> None:
    with client.chat.completions.create(
        model="tiny",
        messages=[MESSAGE],
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXACT_LENGTH,
    ) as stream:
        chunks = list(stream)
    assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=TOKENS, extra_body=EXACT_LENGTH)
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == TOKENS


def test_completion_streamed(client: OpenAI) -> None:
    with client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=TOKENS, stream=True, extra_body=EXACT_LENGTH
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_unknown_model(client: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="nobody", messages=[MESSAGE])
