"""Requests that are odd, or that two parts cannot serve; and workers that are not what they were."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.fakes.raw_client import post
from tests.router.disaggregation.fleets import CHAT, CONNECTORS, PROMPT, TEXT, Fleet, alone, fleet, text_of

BODY = {"model": "sim", "prompt": PROMPT, "max_tokens": 6}
ODD = [
    b'{"prompt":"x","n":1e400}',
    b'{"prompt":[1e400]}',
    b'{"prompt":"x","\xff":1}',
    b'{"prompt":"\xff"}',
    b'{"prompt":["\xff"]}',
    b'{"prompt":["\xff","y"]}',
    b'{"prompt":"x","kv_transfer_params":{"a":1e400}}',
    b'{"prompt":"x","kv_transfer_params":{"\xff":1}}',
    b'{"prompt":"x","kv_transfer_params":[' + b"[" * 500 + b"]" * 500 + b"]}",
    b'{"prompt":"x","n":123456789012345678901234567890}',
]


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_body_that_nobody_can_read_ends_no_connection(connector: str) -> None:
    """Its parameters for a transfer are replaced; of the rest the engine says what it wants."""
    async with fleet(connector) as pairs, pairs.router.client() as client:
        for body in ODD:
            got = await client.ask(post(body=body))
            assert got.status < 500, (body[:60], got)
            assert json.loads(got.body)
        await pairs.settled()
        assert (await client.ask(post(body=json.dumps(BODY).encode()))).status == 200
        pairs.pairs.transfers.violations.clear()  # some of these an engine would have refused before its connector


BATCH = {"model": "sim", "prompt": [PROMPT, PROMPT[::-1]], "max_tokens": 3}


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_batch(connector: str) -> None:
    """Served in two parts where the engines can, by a worker that does it all where there is one, else refused."""
    expected = [await alone(connector, {**BATCH, "prompt": prompt}) for prompt in BATCH["prompt"]]  # type: ignore[attr-defined]
    able = connector in {"sglang", "store"}
    async with fleet(connector) as pairs:
        status, answer = await pairs.post(BATCH)
        if able:
            assert status == 200, answer
            assert [text_of({"choices": [choice]}) for choice in answer["choices"]] == expected
        else:
            assert status == 400
            assert "several prompts" in answer["error"]["message"]
        await pairs.settled()
    if not able:
        async with fleet(connector, boths=1) as pairs:
            status, answer = await pairs.post(BATCH)
            assert status == 200
            assert [text_of({"choices": [choice]}) for choice in answer["choices"]] == expected


async def test_what_cannot_be_split_may_go_to_who_is_sick_where_nobody_else_serves_requests_whole() -> None:
    """Pairs are up, but as good as nobody for it."""
    async with fleet("nixl", boths=1) as pairs:
        of_router = pairs.router.app._fleet
        of_router.trip(of_router.workers["b0"], "a test", time.monotonic())
        status, answer = await pairs.post(BATCH)
        assert status == 200, answer


async def test_what_cannot_be_split_is_not_wrong_because_who_serves_requests_whole_is_away() -> None:
    """A client of OpenAI's asks again after 503, and never after 400."""
    async with fleet("nixl", boths=1) as pairs:
        of_router = pairs.router.app._fleet
        b0 = of_router.workers["b0"]
        of_router.mark_down(b0, "a test")
        status, answer = await pairs.post(BATCH)
        assert status == 503, answer
        assert "several prompts" in answer["error"]["message"]
        of_router.mark_up(b0)
        of_router.drain(b0, True)
        assert (await pairs.post(BATCH))[0] == 503
        of_router.drain(b0, False)
        assert (await pairs.post(BATCH))[0] == 200


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_the_probabilities_of_a_prompt(connector: str) -> None:
    """They kill engines of vLLM that decode only; a worker that does it all tells them."""
    body = {**BODY, "echo": True, "logprobs": 1}
    async with fleet(connector) as pairs:
        status, answer = await pairs.post(body)
        assert status == 400
        assert "log probabilities of its prompt" in answer["error"]["message"]
    async with fleet(connector, boths=1) as pairs:
        assert (await pairs.post(body))[0] == 200
        assert not any(pairs.worker(name).ranks[0].scheduler.counters.prompt_tokens for name in ("p0", "d0"))


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_what_is_too_long_with_its_answer_is_not_computed_first(connector: str) -> None:
    """Only a decode worker of vLLM would have refused it, and the KV waited for its lease to end."""
    sim = {"max_model_len": 64}
    for boths in (0, 1):
        async with fleet(connector, boths=boths, sim=sim, router_mode="kv") as pairs:
            status, answer = await pairs.post({**BODY, "max_tokens": 25})
            assert status == 400, answer
            if not boths and connector != "sglang":  # clients that shorten their prompt look for these words
                assert answer["error"]["message"].startswith("This model's maximum context length is 64 tokens. ")
                assert answer["error"]["code"] == "context_length_exceeded"
            await pairs.settled()
            assert not any(rank.scheduler.counters.prompt_tokens for rank in pairs.worker("p0").ranks)
            status, answer = await pairs.post({**BODY, "max_tokens": 24})
            assert status == 200, answer


async def test_what_is_too_long_for_who_is_up_may_fit_who_is_away() -> None:
    async with fleet("nixl", boths=1, sim={"max_model_len": 64}, router_mode="kv") as pairs:
        of_router = pairs.router.app._fleet
        of_router.mark_down(of_router.workers["b0"], "a test")
        status, answer = await pairs.post({**BODY, "max_tokens": 25})
        assert status == 503, answer
        assert "leaves room for 24" in answer["error"]["message"]


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_an_answer_of_no_tokens_is_refused_before_the_prompt_is_computed(connector: str) -> None:
    async with fleet(connector) as pairs:
        for path, prompt in ((TEXT, {"prompt": PROMPT}), (CHAT, {"messages": [{"role": "user", "content": "x" * 40}]})):
            status, answer = await pairs.post({**prompt, "max_tokens": 0}, path)
            assert status == 400, answer
            assert "max_tokens must be at least 1, got 0" in str(answer)
        await pairs.settled()
        assert not any(rank.scheduler.counters.prompt_tokens for rank in pairs.worker("p0").ranks)


@pytest.mark.parametrize("connector", ["mooncake", "sglang", "nixl", "nixl-push"])
async def test_ranks(connector: str) -> None:
    """Of several each has its own engine id, room or place; the answer is the same."""
    expected = await alone(connector, BODY)
    async with fleet(connector, sim={"dp_size": 3}, router_mode="round-robin") as pairs:
        answers = await asyncio.gather(*(pairs.post(BODY) for _ in range(9)))
        assert [(status, text_of(answer)) for status, answer in answers] == [(200, expected)] * 9
        used = [rank.scheduler.counters.prefill_tokens for rank in pairs.worker("p0").ranks]
        assert all(used), used


async def test_each_rank_is_where_its_own_answers_say() -> None:
    """Its second request and those after it are sent to both at once."""
    expected = await alone("nixl-push", BODY)
    async with fleet("nixl-push", sim={"dp_size": 3}, router_mode="round-robin") as pairs:
        for _ in range(9):
            status, answer = await pairs.post(BODY)
            assert (status, text_of(answer)) == (200, expected)


async def test_a_client_that_uses_its_id_again(expected_text: str) -> None:
    async with fleet("nixl-push") as pairs:
        for _ in range(3):
            status, answer = await pairs.post(BODY, X_Request_Id="mine")
            assert (status, text_of(answer)) == (200, expected_text)


@pytest.fixture(scope="module")
def expected_text() -> str:
    return asyncio.run(alone("nixl", BODY))


async def test_an_engine_that_has_started_anew_is_found_again(expected_text: str) -> None:
    """Where it was is forgotten when a decode part fails, and told by its next answer."""
    async with fleet("nixl-push", violations=1) as pairs:
        assert (await pairs.post(BODY))[0] == 200
        await _move(pairs)
        statuses = [(await pairs.post(BODY))[0]]
        await pairs.settled()
        status, answer = await pairs.post(BODY)
        assert (status, text_of(answer)) == (200, expected_text)
        assert statuses == [500]
    async with fleet("nixl-push", decodes=2, violations=1) as pairs:
        assert (await pairs.post(BODY))[0] == 200
        await _move(pairs)
        status, answer = await pairs.post(BODY)
        assert (status, text_of(answer)) == (200, expected_text), "another decode worker, told by the answer"


async def test_an_engine_that_was_away_is_asked_anew_where_it_is(expected_text: str) -> None:
    """vLLM waits for ever for an engine that it has met and that is no more."""
    async with fleet("nixl-push") as pairs:
        assert (await pairs.post(BODY))[0] == 200
        known = pairs.router.app._fleet
        known.mark_down(known.workers["p0"], "restarts")
        await _move(pairs)
        known.mark_up(known.workers["p0"])
        status, answer = await pairs.post(BODY)
        assert (status, text_of(answer)) == (200, expected_text)


async def _move(pairs: Fleet) -> None:
    place = pairs.worker("p0").place
    place.engine_ids = [f"{engine_id}-anew" for engine_id in place.engine_ids]


async def test_embeddings_and_the_like_need_a_worker_that_does_it_all() -> None:
    async with fleet("nixl") as pairs:
        status, answer = await pairs.post({"model": "sim", "input": "x"}, "/v1/embeddings")
        assert status == 503
        assert "in two parts" in answer["error"]["message"]
    async with fleet("nixl", boths=1) as pairs:
        status, _ = await pairs.post({"model": "sim", "input": "x"}, "/v1/embeddings")
        assert status == 404, "as the simulated worker says"


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_a_worker_of_one_part_serves_nothing_alone(name: str) -> None:
    async with fleet("nixl", boths=1) as pairs:
        status, answer = await pairs.post(BODY, X_Router_Target_Worker=name)
        assert status == 503
        assert "serves no request alone" in answer["error"]["message"]
        status, _ = await pairs.post(BODY, X_Router_Target_Worker="b0")
        assert status == 200
        assert pairs.worker(name).ranks[0].scheduler.counters.prompt_tokens == 0


@pytest.mark.parametrize("mode", ["kv", "random", "round-robin", "least-loaded", "power-of-two"])
async def test_every_policy_can_choose_who_prefills(mode: str, expected_text: str) -> None:
    messages = [{"role": "user", "content": "a question that fills more than one block"}]
    async with fleet("nixl", prefills=2, decodes=2, boths=1, router_mode=mode) as pairs:
        for _ in range(3):
            status, answer = await pairs.post(BODY)
            assert (status, text_of(answer)) == (200, expected_text)
            status, _ = await pairs.post({"model": "sim", "messages": messages, "max_tokens": 3}, CHAT)
            assert status == 200
