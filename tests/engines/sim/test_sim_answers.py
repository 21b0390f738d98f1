"""Answers are a function of the tokens so far: whoever is given a part of one goes on with the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sim import answers
from engines.sim.answers import answer_start
from engines.sim.tokens import ByteTokenizer, make_answers
from indexer import hash_kernels
from indexer.hashing import pack_tokens
from tests.engines.sim.fleets import client

TOKENS = list(range(100, 140))
WORDS = make_answers(ByteTokenizer(), seed=1).tokens
IDS = pack_tokens(WORDS)


def answer(tokens: list[int], count: int) -> list[int]:
    start = answer_start(pack_tokens(tokens), IDS)
    return [WORDS[(start + at) % len(WORDS)] for at in range(count)]


@given(st.lists(st.sampled_from([*range(3, 259), *WORDS[:200]]), min_size=1, max_size=60), st.integers(0, 40))
def test_the_rest_of_an_answer(prompt: list[int], said: int) -> None:
    whole = answer(prompt, 60)
    assert answer(prompt + whole[:said], 60 - said) == whole[said:]


def test_answers_differ() -> None:
    assert len({tuple(answer([3 + first, 3 + second], 30)) for first in range(20) for second in range(20)}) > 350


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": TOKENS}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}]}),
    ],
)
async def test_a_stream_tells_its_tokens_and_another_worker_goes_on(path: str, asked: dict[str, object]) -> None:
    async with client() as worker, client() as other:
        *chunks, _ = await worker.stream(path, {**asked, "max_tokens": 30, "return_token_ids": True})
        choices = [chunk["choices"][0] for chunk in chunks]
        first = choices[0] if path == "/v1/completions" else chunks[0]
        prompt = first["prompt_token_ids"]
        tokens = [token for choice in choices for token in choice.get("token_ids") or []]
        text = "".join(choice.get("text", choice.get("delta", {}).get("content")) for choice in choices)
        assert (len(prompt) > 30, len(tokens), len(text)) == (True, 30, 30)
        rest = await other.complete(prompt + tokens[:12], 18)
        assert rest["choices"][0]["text"] == text[12:]


async def test_tokens_are_told_to_those_who_ask() -> None:
    async with client() as worker:
        for chunk in (await worker.stream("/v1/completions", {"prompt": TOKENS, "max_tokens": 3}))[:-1]:
            assert chunk["choices"][0]["token_ids"] is chunk["choices"][0]["prompt_token_ids"] is None


async def test_no_request_waits_for_a_compiler() -> None:
    """The kernels begin with none of what other tests have had compiled; a fleet that is up has all that is asked."""
    kernels: list[Any] = [answers._find, hash_kernels.chain]
    for kernel in kernels:
        kernel._reset_overloads()
    async with client() as worker:
        before = [list(kernel.signatures) for kernel in kernels]
        await worker.complete("word " * 100, 20)
    assert all(before)
    assert [list(kernel.signatures) for kernel in kernels] == before
