"""`--send-token-ids`: prompts go to engines as the ids that the router made of them, where these are found to take
them, and byte for byte as they came elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from router import housekeeping
from router.workers.spec import parse_worker
from tests.fakes.raw_client import post
from tests.fakes.scripted_worker import Dialogue, Pages, Script, ScriptedWorker, answer
from tests.fakes.waiting import until
from tests.router.disaggregation.fleets import running as running_as
from tests.router.proxy.running import RunningRouter, running
from tests.router.test_prompts import CHAT, TEXT, chat_text, folder, tokens_of
from tests.router.tokens.conftest import model_folder, reference

__all__ = ["folder", "model_folder", "reference"]

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "max_tokens": 4}
CONVERSATION: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 4}
PARAMS = {"remote_block_ids": [1]}


class OwnTokens(Pages):
    """An engine with `reference` for its tokenizer."""

    def __init__(self, reference: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._reference = reference

    def _tokenize(self, body: bytes) -> Any:
        return {"tokens": tokens_of(self._reference, body)}


def engine(takes: bool) -> Script:
    """Whose answer tells how long its prompt was, and what its KV is known by."""

    async def script(dialogue: Dialogue) -> None:
        ids = (json.loads(dialogue.request.body).get("kv_transfer_params") or {}).get("prompt_token_ids")
        usage = {"prompt_tokens": len(ids) if takes and ids else 99}
        await answer(json.dumps({"usage": usage, "kv_transfer_params": PARAMS}).encode())(dialogue)

    return script


@asynccontextmanager
async def fleet(
    reference: tokenizers.Tokenizer, folder: Path, *takes: bool, roles: str = "", **settings: Any
) -> AsyncIterator[tuple[RunningRouter, list[ScriptedWorker]]]:
    """A worker for each; `roles`: one letter for each, by nixl. What they were asked at first is forgotten."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(ScriptedWorker(f"w{at}", OwnTokens(reference), engine(takes[at])))
            for at in range(len(takes))
        ]
        given = {"router_mode": "kv", "tokenizer": str(folder), "send_token_ids": True, **settings}
        names = {"p": "prefill", "d": "decode"}
        specs = [
            parse_worker(f"{worker.url},name={worker.name},role={names[role]},connector=nixl")
            for worker, role in zip(workers, roles, strict=False)
        ]
        started = running_as(tuple(specs), **given) if specs else running(*workers, **given)
        router = await stack.enter_async_context(started)
        for worker in workers:
            worker.requests.clear()
        yield router, workers


async def asked(router: RunningRouter, workers: list[ScriptedWorker], path: str, body: bytes) -> list[bytes]:
    """What the workers were sent."""
    async with router.client() as client:
        assert (await client.ask(post(path, body))).status == 200
    return [request.body for worker in workers for request in worker.requests]


def sent_as_ids(router: RunningRouter) -> float:
    return router.total("router_token_ids_sent_requests_total")


async def test_a_completion_and_a_chat_go_as_token_ids(reference: tokenizers.Tokenizer, folder: Path) -> None:
    async with fleet(reference, folder, True) as (router, workers):
        (got,) = await asked(router, workers, "/v1/completions", json.dumps(COMPLETION).encode())
        assert json.loads(got) == {**COMPLETION, "prompt": reference.encode(TEXT).ids}
        _, got = await asked(router, workers, "/v1/chat/completions", json.dumps(CONVERSATION).encode())
        ids = reference.encode(chat_text(CHAT), add_special_tokens=False).ids
        assert json.loads(got) == {**CONVERSATION, "kv_transfer_params": {"prompt_token_ids": ids}}
        assert sent_as_ids(router) == 2


@pytest.mark.parametrize(
    "more",
    [{"prompt": [TEXT, TEXT]}, {"prompt": [1, 2]}, {"echo": True}, {"truncate_prompt_tokens": 3}],
    ids=lambda more: f"{more}"[:16],
)
async def test_others_go_as_they_came(reference: tokenizers.Tokenizer, folder: Path, more: dict[str, Any]) -> None:
    body = json.dumps({**COMPLETION, **more}, indent=1).encode()
    async with fleet(reference, folder, True) as (router, workers):
        assert await asked(router, workers, "/v1/completions", body) == [body]
        assert sent_as_ids(router) == 0


async def test_a_clients_own_ids_stay(reference: tokenizers.Tokenizer, folder: Path) -> None:
    body = json.dumps({**CONVERSATION, "kv_transfer_params": {"prompt_token_ids": [1]}}).encode()
    async with fleet(reference, folder, True) as (router, workers):
        assert await asked(router, workers, "/v1/chat/completions", body) == [body]


@pytest.mark.parametrize(("takes", "settings"), [((True, False), {}), ((True,), {"send_token_ids": False})])
async def test_unless_all_take_ids_and_it_is_wanted_they_go_as_text(
    reference: tokenizers.Tokenizer, folder: Path, takes: tuple[bool, ...], settings: dict[str, Any]
) -> None:
    body = json.dumps(CONVERSATION, indent=1).encode()
    async with fleet(reference, folder, *takes, **settings) as (router, workers):
        assert await asked(router, workers, "/v1/chat/completions", body) == [body]


async def test_one_that_leaves_is_in_no_ones_way(reference: tokenizers.Tokenizer, folder: Path) -> None:
    async with fleet(reference, folder, True, False) as (router, workers):
        roster, fleet_ = router.app._roster, router.app._context.fleet
        assert roster
        roster.leave(fleet_.workers["w1"], 0.0)
        await until(lambda: "w1" not in fleet_.workers)
        (got,) = await asked(router, workers, "/v1/completions", json.dumps(COMPLETION).encode())
        assert json.loads(got)["prompt"] == reference.encode(TEXT).ids


async def test_another_tokenizer_than_the_engines_sends_nothing(reference: tokenizers.Tokenizer, folder: Path) -> None:
    class Other(OwnTokens):
        def _tokenize(self, body: bytes) -> Any:
            return {"tokens": [token + 1 for token in super()._tokenize(body)["tokens"]]}

    body = json.dumps(COMPLETION).encode()
    async with ScriptedWorker("a", Other(reference), engine(takes=True)) as worker:
        given: dict[str, Any] = {"router_mode": "kv", "tokenizer": str(folder), "send_token_ids": True}
        async with running(worker, **given) as router:
            worker.requests.clear()
            assert await asked(router, [worker], "/v1/completions", body) == [body]


async def test_both_parts_get_them(reference: tokenizers.Tokenizer, folder: Path) -> None:
    async with fleet(reference, folder, True, True, roles="pd") as (router, workers):
        prefill, decode = await asked(router, workers, "/v1/chat/completions", json.dumps(CONVERSATION).encode())
        ids = reference.encode(chat_text(CHAT), add_special_tokens=False).ids
        assert json.loads(prefill)["kv_transfer_params"]["prompt_token_ids"] == ids
        assert json.loads(decode)["kv_transfer_params"] == {**PARAMS, "prompt_token_ids": ids}


async def test_a_stream_that_may_go_on_elsewhere_is_asked_for_its_tokens_too(
    reference: tokenizers.Tokenizer, folder: Path
) -> None:
    streamed = {**CONVERSATION, "stream": True}
    async with fleet(reference, folder, True, True, migration_limit=1) as (router, workers):
        (got,) = await asked(router, workers, "/v1/chat/completions", json.dumps(streamed).encode())
        ids = reference.encode(chat_text(CHAT), add_special_tokens=False).ids
        wanted = {"kv_transfer_params": {"prompt_token_ids": ids}, "return_token_ids": True}
        assert json.loads(got) == {**streamed, **wanted}


async def test_what_is_held_until_a_worker_is_back_goes_as_it_came(
    reference: tokenizers.Tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another engine by then."""
    monkeypatch.setattr(housekeeping, "INTERVAL", 0.01)
    body = json.dumps(COMPLETION).encode()
    async with fleet(reference, folder, True, wait_for_worker=600.0) as (router, workers):
        (worker,) = router.app._fleet.workers.values()
        router.app._fleet.mark_down(worker, "restarts")
        sent = asyncio.ensure_future(asked(router, workers, "/v1/completions", body))
        await until(lambda: router.total("router_queue_length"))
        router.app._fleet.mark_up(worker)
        assert await sent == [body]
