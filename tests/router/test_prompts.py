"""A prompt becomes token ids here, by an engine, or not at all; each way is counted, and none is quoted in a log."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import tokenizers

from engines.description import EngineDescription, EngineKind, Model
from engines.sim.tokens import text_of
from indexer.hashing import Tokens, pack_tokens
from indexer.kv_indexer import KVIndexer, PromptHashes, hash_prompt
from indexer.types import PLAIN, Namespace, WorkerRank
from publishers.logs import JsonFormatter
from router.answering import MOST_UNANSWERED, REST
from router.context import Prompt, RouterContext
from router.http.pool import Pool
from router.metrics.registry import Metrics
from router.openai.engine_paths import GENERATE
from router.openai.errors import BadRequest
from router.openai.inference import RENDERED, parse_inference
from router.outage import Outage
from router.prompts import LONG, Prompts
from router.retry_budget import RetryBudget
from router.routing import RequestRouting
from router.scheduling.admission import Admission
from router.scheduling.balance import LeastLoaded
from router.scheduling.load import LoadBook
from router.scheduling.others import Others
from router.scheduling.queue import Queue
from router.scheduling.scheduler import Scheduler
from router.tokens import Endpoint, PromptTokens, Tokenizer, stand_ins
from router.tokens.stand_ins import MEDIA_TOKENS
from router.workers.fleet import Fleet
from router.workers.spec import parse_worker
from router.workers.worker import Worker
from tests.fakes.http_engine import Answer, HttpEngine, running
from tests.router.scheduling.candidates import Scripted
from tests.router.tokens.conftest import CONFIG, SYSTEM_FIRST, model_folder, reference, write_model

__all__ = ["model_folder", "reference"]

NOWHERE = "http://127.0.0.1:9"
BLOCK = 4
TEXT = "The quick brown fox jumps over the lazy dog and sleeps."
CHAT = [{"role": "user", "content": "Which worker holds most of it?"}]
CALLS = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]


@pytest.fixture
def folder(model_folder: Path) -> Path:
    return model_folder


class TokenizingEngine(HttpEngine):
    """Its /tokenize answers what `reference` makes, each id moved by `shift`."""

    def __init__(self, reference: tokenizers.Tokenizer, shift: int = 0) -> None:
        super().__init__({"/tokenize": self._tokenize, "/v1/tokenize": self._tokenize})
        self._reference = reference
        self.shift = shift

    def _tokenize(self, body: bytes) -> Answer:
        ids = tokens_of(self._reference, body)
        return 200, msgspec.json.encode({"tokens": [token + self.shift for token in ids]})


def tokens_of(reference: tokenizers.Tokenizer, body: bytes) -> list[int]:
    """What an engine with the tokenizer `reference` answers to /tokenize."""
    fields = msgspec.json.decode(body)
    messages = fields.get("messages")
    text = chat_text(messages) if messages else fields["prompt"]
    ids: list[int] = reference.encode(text, add_special_tokens=not messages).ids
    return ids


def chat_text(messages: list[dict[str, str]]) -> str:
    turns = "".join(f"<|im_start|>{each['role']}\n{text_of(each)}<|im_end|>\n" for each in messages)
    return turns + "<|im_start|>assistant\n"


class Scene:
    """Everything that a prompt passes, with one worker that serves the model m and its adapter."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        setting: str,
        url: str,
        folder: Path | None,
        max_model_len: int | None,
        kind: EngineKind = "vllm",
    ) -> None:
        self.now = 0.0
        self.worker = Worker(parse_worker(f"{url},name=w"), Pool(url, 1.0))
        base = Model("m", max_model_len=max_model_len)
        self.worker.description = EngineDescription(
            kind,
            models=(base, Model("adapter", parent="m")),
            block_size=BLOCK,
            tokenizer_path=str(folder) if folder else None,
        )
        fleet, book = Fleet([self.worker]), LoadBook()
        fleet.mark_up(self.worker)
        scheduler = Scheduler(LeastLoaded(), book, Scripted([]))
        queue = Queue(scheduler, Admission(), lambda: 0.0, lambda seconds, callback: None)
        self.context = RouterContext(
            fleet, book, scheduler, queue, KVIndexer(), Metrics(), lambda: self.now, RetryBudget(0.2, 0.0)
        )
        self.prompts = Prompts(setting, self.context, session)

    def join(self, url: str) -> None:
        """Another worker that is as the first, and to be asked after it."""
        other = Worker(parse_worker(f"{url},name=x"), Pool(url, 1.0))
        other.description = self.worker.description
        self.context.fleet.add(other)
        self.context.fleet.mark_up(other)

    def describe(self, version: str) -> None:
        assert self.worker.description
        self.worker.description = msgspec.structs.replace(self.worker.description, version=version)

    def hold(self) -> None:
        """From now on requests are held until a worker is up."""
        self.context = self.context._replace(outage=Outage(60.0, self.context.queue.limits))
        self.prompts._context = self.context

    async def learn(self) -> None:
        await self.prompts.learn(self.worker)

    async def prompt(self, endpoint: Endpoint = "completions", /, **fields: Any) -> Prompt:
        return await self.prompt_of(endpoint, msgspec.json.encode({"model": "m", **fields}))

    async def prompt_of(self, endpoint: Endpoint, raw: bytes) -> Prompt:
        return comparable(await self.made(endpoint, raw))

    async def made(self, endpoint: Endpoint, raw: bytes) -> Prompt:
        inference = parse_inference(endpoint, raw)
        routing = RequestRouting(self.context, inference.model)
        pending = self.prompts.prepare(inference, routing)
        if pending is not None:
            await pending
        return routing.prompt

    def guess(self, path: bytes, **fields: Any) -> Prompt:
        """Of a request on another path."""
        routing = RequestRouting(self.context, "m")
        self.prompts.guess(routing, "m", fields, RENDERED[path])
        return comparable(routing.prompt)

    def count(self, name: str, **labels: str) -> float:
        return self.context.metrics.registry.get_sample_value(f"router_{name}_total", labels) or 0.0

    @property
    def asked_engine(self) -> float:
        return self.count("engine_tokenized_requests")

    def untokenized(self, reason: str) -> float:
        return self.count("untokenized_requests", reason=reason)


@asynccontextmanager
async def scene(
    setting: str = "auto",
    url: str = NOWHERE,
    folder: Path | None = None,
    max_model_len: int | None = None,
    kind: EngineKind = "vllm",
) -> AsyncIterator[Scene]:
    async with aiohttp.ClientSession() as session:
        made = Scene(session, setting, url, folder, max_model_len, kind)
        await made.learn()
        yield made


def known(ids: list[int], namespace: Namespace = PLAIN) -> Prompt:
    return comparable(Prompt(len(ids), hash_prompt(ids, [BLOCK], namespace)))


def guessed(*said: object, apart: str = "m\0None\0None", salt: str | None = None) -> Prompt:
    """Of what stands for them."""
    tokens = stand_ins(said)
    return comparable(Prompt(len(tokens), hash_prompt(tokens, [BLOCK], Namespace(apart, salt)), guessed=True))


def comparable(prompt: Prompt) -> Prompt:
    """Arrays have no equality of their own."""
    if prompt.hashes is None:
        return prompt
    begins = prompt.begins and _comparable(prompt.begins)
    return prompt._replace(hashes=_comparable(prompt.hashes), begins=begins)


def _comparable(hashes: PromptHashes) -> PromptHashes:
    chains: Any = {size: chain.tolist() for size, chain in hashes.chains.items()}
    return hashes._replace(chains=chains)


# -- here


async def test_token_ids_need_neither_tokenizer_nor_engine() -> None:
    async with scene() as made:
        assert await made.prompt(prompt=[1, 2, 3, 4, 5]) == known([1, 2, 3, 4, 5])
        assert await made.prompt(prompt=[[1, 2, 3, 4]]) == known([1, 2, 3, 4])
        assert made.asked_engine == 0


async def test_text_by_the_tokenizer_at_hand(folder: Path, reference: tokenizers.Tokenizer) -> None:
    ids = reference.encode(TEXT).ids
    async with scene(str(folder)) as made:
        assert await made.prompt(prompt=TEXT) == known(ids)
        assert await made.prompt(prompt=[TEXT]) == known(ids)
        assert await made.prompt(prompt=TEXT, add_special_tokens=False) == known(ids[1:])
        assert made.asked_engine == 0


async def test_of_a_batch_the_first_prompt_is_looked_up_and_the_others_count(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    ids = reference.encode(TEXT).ids
    other = "Something else. " * 10
    async with scene(str(folder)) as made:
        texts = await made.prompt(prompt=[TEXT, other, TEXT], n=2)
        assert texts == known(ids)._replace(others=Others(5, len(other) // 4))
        packed = await made.prompt(prompt=[[1, 2, 3, 4], [1, 2, 9]])
        assert packed == known([1, 2, 3, 4])._replace(others=Others(1, 1))
        scored = await made.prompt(prompt=[[1, 2, 3, 4], [1, 2, 3, 5]], echo=True, logprobs=1)
        assert scored.others == Others(1, 4)
        untold = await made.prompt(prompt=[TEXT, other], suffix="x")
        assert untold == guessed(TEXT)._replace(others=Others(1, len(other) // 4))


async def test_one_prompt_may_be_answered_several_times(folder: Path, reference: tokenizers.Tokenizer) -> None:
    async with scene(folder=folder) as made:
        one = await made.prompt(prompt=TEXT, n=1)
        assert one == known(reference.encode(TEXT).ids)
        assert await made.prompt(prompt=TEXT, n=3) == one._replace(others=Others(2))
        assert (await made.prompt("chat", messages=CHAT, n=3)).others == Others(2)


async def test_a_chat_by_the_models_template(folder: Path, reference: tokenizers.Tokenizer) -> None:
    ids = reference.encode(chat_text(CHAT), add_special_tokens=False).ids
    async with scene(folder=folder) as made:
        assert await made.prompt("chat", messages=CHAT) == known(ids)


async def test_adapters_and_salts_have_prefixes_of_their_own(folder: Path, reference: tokenizers.Tokenizer) -> None:
    ids = reference.encode(TEXT).ids
    async with scene(folder=folder) as made:
        assert await made.prompt(model="adapter", prompt=TEXT) == known(ids, Namespace("adapter"))
        assert await made.prompt(cache_salt="s", prompt=TEXT) == known(ids, Namespace(None, "s"))
        both = await made.prompt(model="adapter", cache_salt="s", prompt=TEXT)
        assert both == known(ids, Namespace("adapter", "s"))
        hashed = [prompt.hashes for prompt in (both, await made.prompt(prompt=TEXT))]
        assert hashed[0] != hashed[1]


async def test_without_a_model_the_only_base_model_is_meant(folder: Path, reference: tokenizers.Tokenizer) -> None:
    async with scene(folder=folder) as made:
        raw = msgspec.json.encode({"prompt": TEXT})
        assert await made.prompt_of("completions", raw) == known(reference.encode(TEXT).ids)


async def test_what_is_held_until_a_worker_is_back_is_tokenized_as_ever(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    ids = reference.encode(TEXT).ids
    async with scene(folder=folder) as made:
        made.context.fleet.mark_down(made.worker, "restarts")
        assert (await made.prompt(prompt=TEXT)).tokens == 0, "the answer will be that no worker is up"
        made.hold()
        assert await made.prompt(prompt=TEXT) == known(ids)
        assert await made.prompt(model="adapter", prompt=TEXT) == known(ids, Namespace("adapter"))
        with pytest.raises(BadRequest, match="no token id of this model"):
            await made.prompt(prompt=[10**6])
        assert await made.prompt(model="x", prompt=TEXT) == guessed(TEXT, apart="x\0None\0None")


async def test_while_a_long_prompt_is_tokenized_everything_goes_on(reference: tokenizers.Tokenizer) -> None:
    go_on = threading.Event()

    def encode(text: str, special: bool) -> Tokens:
        assert text == TEXT or go_on.wait(30.0)
        return pack_tokens(reference.encode(text, add_special_tokens=special).ids)

    text = TEXT * (LONG // len(TEXT) + 1)
    async with scene() as made:
        made.prompts._models.prompt_tokens["m"] = PromptTokens(Tokenizer(encode, str, None, "a slow one", 2**20))
        long = asyncio.ensure_future(made.prompt(prompt=text))
        for _ in range(3):
            assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)
        assert not long.done()
        go_on.set()
        assert await long == known(reference.encode(text).ids)


async def test_of_a_long_prompt_the_same_is_found_out(folder: Path, reference: tokenizers.Tokenizer) -> None:
    text = TEXT * (LONG // len(TEXT) + 1)
    async with running(TokenizingEngine(reference)) as engine:
        async with scene(url=engine.url, folder=folder) as made:
            assert await made.prompt(prompt=text, suffix="") == guessed(text)
            chat = [{"role": "user", "content": text}]
            prompt = await made.prompt("chat", messages=chat, chat_template="{{ messages }}")
            assert prompt == known(reference.encode(chat_text(chat), add_special_tokens=False).ids)
            assert await made.prompt("chat", messages=chat) == prompt
            assert (made.untokenized("untold"), made.asked_engine) == (1, 1)
        async with scene(folder=folder, max_model_len=9) as made:
            with pytest.raises(BadRequest, match="maximum context length is 9 tokens"):
                await made.prompt(prompt=text)


# -- by an engine


async def test_an_engine_is_asked_where_no_tokenizer_is_at_hand(
    reference: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url) as made:
        assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)
        chat = reference.encode(chat_text(CHAT), add_special_tokens=False).ids
        assert await made.prompt("chat", messages=CHAT) == known(chat)
        assert made.asked_engine == 2
        assert [path for path, _ in engine.asked] == ["/tokenize"] * 2
    (told,) = [record for record in caplog.records if record.getMessage() == "No tokenizer is at hand"]
    assert told.__dict__["fields"]["model"] == "m"


async def test_the_setting_engine_asks_each_time_and_says_nothing(
    folder: Path, reference: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene("engine", engine.url, folder) as made:
        for _ in range(2):
            await made.prompt(prompt=TEXT)
        assert made.asked_engine == 2
    assert not caplog.records


async def test_sglang_is_asked_in_its_own_way(reference: tokenizers.Tokenizer) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url, kind="sglang") as made:
        assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)
        assert [path for path, _ in engine.asked] == ["/v1/tokenize"]


@pytest.mark.parametrize("said", [{"thinking": {"type": "disabled"}}, {"task": "title"}])
async def test_sglang_is_asked_where_a_field_of_its_own_decides(
    folder: Path, reference: tokenizers.Tokenizer, said: dict[str, Any]
) -> None:
    ids = reference.encode(chat_text(CHAT), add_special_tokens=False).ids
    async with (
        running(TokenizingEngine(reference)) as engine,
        scene(url=engine.url, folder=folder, kind="sglang") as made,
    ):
        assert await made.prompt("chat", messages=CHAT, **said) == known(ids)
        assert made.asked_engine == 1
        assert msgspec.json.decode(engine.asked[-1][1]) == {"model": "m", "messages": CHAT, **said}


async def test_an_engine_of_another_kind_that_serves_another_model_changes_nothing(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url, folder=folder) as made:
        other = Worker(parse_worker(f"{engine.url},name=v"), Pool(engine.url, 1.0))
        other.description = EngineDescription("sglang", models=(Model("other"),), block_size=BLOCK)
        made.context.fleet.add(other)
        await made.learn()
        ids = reference.encode(chat_text(CHAT), add_special_tokens=False).ids
        assert await made.prompt("chat", messages=CHAT, task="title") == known(ids)
        assert made.asked_engine == 0, "only to SGLang is it a field that decides"


async def test_what_is_not_followed_here_is_asked(folder: Path, reference: tokenizers.Tokenizer) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url, folder=folder) as made:
        assert made.asked_engine == 0
        prompt = await made.prompt("chat", messages=CHAT, chat_template="{{ messages }}")
        assert prompt == known(reference.encode(chat_text(CHAT), add_special_tokens=False).ids)
        assert made.asked_engine == 1


async def test_a_tokenizer_that_is_the_engines_is_trusted_until_the_worker_comes_back(
    folder: Path, reference: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url, folder=folder) as made:
        checks = len(engine.asked)
        assert checks > 0
        await made.prompt(prompt=TEXT)
        assert len(engine.asked) == checks
        await made.learn()  # the worker came back: it may be another engine
        assert len(engine.asked) == 2 * checks
        assert (made.asked_engine, made.count("tokenizer_mismatches", model="m")) == (0, 0)
    assert [record.getMessage() for record in caplog.records] == ["Tokenizer is ready"]


async def test_a_tokenizer_that_is_not_the_engines_is_told_and_not_used(
    folder: Path, reference: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(TokenizingEngine(reference, shift=1)) as engine, scene(url=engine.url, folder=folder) as made:
        assert made.count("tokenizer_mismatches", model="m") == 1
        assert await made.prompt(prompt=TEXT) == known([token + 1 for token in reference.encode(TEXT).ids])
        assert made.asked_engine == 1
    (told,) = caplog.records
    assert told.levelno == logging.ERROR
    assert told.getMessage().startswith("The tokenizer is not the engine's")
    assert (told.__dict__["fields"]["model"], told.__dict__["fields"]["worker"]) == ("m", "w")


async def test_one_engine_that_differs_counts_though_another_agrees_later(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    """Both are checked at once, and the one that agrees answers last."""
    alike, other, told = TokenizingEngine(reference), TokenizingEngine(reference, shift=1), asyncio.Event()

    async def slowly(body: bytes) -> Answer:
        await told.wait()
        return alike._tokenize(body)

    async with running(alike), running(other), scene(url=alike.url, folder=folder) as made:
        differing = Worker(parse_worker(f"{other.url},name=v"), Pool(other.url, 1.0))
        differing.description = made.worker.description
        alike.answers["/tokenize"] = slowly
        checking = asyncio.ensure_future(made.learn())
        await made.prompts.learn(differing)
        assert made.count("tokenizer_mismatches", model="m") == 1
        told.set()
        await checking
        await made.prompt(prompt=TEXT)
        assert made.asked_engine == 1
        made.prompts.forget("v")
        await made.prompt(prompt=TEXT)
        assert made.asked_engine == 1


async def test_until_it_is_checked_again_an_engine_that_differs_is_not_believed(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    async with (
        running(TokenizingEngine(reference, shift=1)) as engine,
        scene(url=engine.url, folder=folder) as made,
    ):
        made.prompts.forget("w", still={"m"})
        assert await made.prompt(prompt=TEXT) == known([token + 1 for token in reference.encode(TEXT).ids])
        assert made.asked_engine == 1


async def test_an_engine_that_differs_no_more_is_believed(folder: Path, reference: tokenizers.Tokenizer) -> None:
    engine = TokenizingEngine(reference, shift=1)
    async with running(engine), scene(url=engine.url, folder=folder) as made:
        engine.shift = 0
        await made.learn()
        assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)
        assert made.asked_engine == 0


async def test_what_comes_under_the_name_of_a_model_that_nobody_serves_any_more_is_known_anew(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url) as made:
        successor = Worker(parse_worker(f"{engine.url},name=v"), Pool(engine.url, 1.0))
        successor.description = EngineDescription(
            "vllm", models=made.worker.models, block_size=BLOCK, tokenizer_path=str(folder)
        )
        made.prompts.forget("w")
        await made.prompts.learn(successor)
        assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)
        assert made.asked_engine == 0
        ends = made.prompts.ends("m")
        assert ends
        assert ends(reference.encode(TEXT).ids)
        made.prompts.forget("v")
        assert made.prompts.ends("m") is None


async def test_the_tokenizer_stays_as_long_as_anybody_serves_its_model(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url, folder=folder) as made:
        other = Worker(parse_worker(f"{engine.url},name=v"), Pool(engine.url, 1.0))
        other.description = EngineDescription("vllm", models=made.worker.models, block_size=BLOCK)
        await made.prompts.learn(other)
        made.prompts.forget("w")
        assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)
        assert made.asked_engine == 0


async def test_only_as_long_as_an_sglang_serves_a_model_is_what_it_renders_otherwise_asked(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url, folder=folder) as made:
        other = Worker(parse_worker(f"{engine.url},name=v"), Pool(engine.url, 1.0))
        other.description = EngineDescription("sglang", models=made.worker.models, block_size=BLOCK)
        made.context.fleet.add(other)
        await made.prompts.learn(other)
        await made.prompt("chat", messages=CHAT, task="title")
        assert made.asked_engine == 1
        made.prompts.forget("v")
        await made.prompt("chat", messages=CHAT, task="title")
        assert made.asked_engine == 1


async def test_an_engine_that_serves_another_model_by_now_is_believed_of_the_first(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    engine = TokenizingEngine(reference, shift=1)
    async with running(engine), scene(url=engine.url, folder=folder) as made:
        other = Worker(parse_worker(f"{engine.url},name=v"), Pool(engine.url, 1.0))
        other.description = made.worker.description
        await made.prompts.learn(other)
        engine.shift = 0
        await made.learn()
        await made.prompt(prompt=TEXT)
        assert made.asked_engine == 1, "the other is not believed to agree by now"
        other.description = EngineDescription("vllm", models=(Model("other"),))
        await made.prompts.learn(other)
        await made.prompt(prompt=TEXT)
        assert made.asked_engine == 1


async def test_a_tokenizer_is_looked_for_once_where_several_workers_come_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scene() as made:
        caplog.clear()
        prompts = Prompts("auto", made.context, made.prompts._session)
        await asyncio.gather(*(prompts.learn(made.worker) for _ in range(3)))
    assert [record.getMessage() for record in caplog.records] == ["No tokenizer is at hand"]


async def test_a_prompt_that_engines_cut_off_is_routed_by_its_text(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    async with (
        running(TokenizingEngine(reference)) as engine,
        scene(url=engine.url, folder=folder, max_model_len=5) as made,
    ):
        assert await made.prompt(prompt=TEXT, truncate_prompt_tokens=4) == guessed(TEXT)
        ids = await made.prompt(prompt=[[1, 2, 3, 4, 5], [6]], truncate_prompt_tokens=4)
        assert ids == guessed(np.array([1, 2, 3, 4, 5], np.uint32))._replace(others=Others(1, 1))
        assert (await made.prompt(prompt=[], truncate_prompt_tokens=4)).hashes is None
        assert (made.asked_engine, made.untokenized("untold")) == (0, 3)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_prompt_with_a_suffix_is_routed_by_its_text(folder: Path, kind: EngineKind) -> None:
    """Its tokens begin with the model's mark of a gap, so that those of its text alone would never be found cached."""
    async with scene(folder=folder, kind=kind) as made:
        for suffix in ("def f():", ""):
            assert await made.prompt(prompt=TEXT, suffix=suffix) == guessed(TEXT)
        assert await made.prompt(prompt=[1, 2], suffix=None) == known([1, 2])
        assert (made.asked_engine, made.untokenized("untold")) == (0, 2)


async def test_a_chat_whose_tokens_the_client_gives_is_routed_by_its_text(folder: Path) -> None:
    """vLLM takes them in place of the messages, but not every version does."""
    async with scene(folder=folder) as made:
        given = await made.prompt("chat", messages=CHAT, kv_transfer_params={"prompt_token_ids": [1, 2]})
        assert given == guessed(CHAT)
        for none in (None, {}, {"prompt_token_ids": None}):
            assert not (await made.prompt("chat", messages=CHAT, kv_transfer_params=none)).guessed
        assert not (await made.prompt(prompt=TEXT, kv_transfer_params={"prompt_token_ids": [1]})).guessed
        assert (made.asked_engine, made.untokenized("untold")) == (0, 1)


async def test_sglangs_fields_keep_equal_prompts_apart(folder: Path) -> None:
    async with scene(folder=folder, kind="sglang") as made:
        for fields, apart in (
            ({"lora_path": "ad"}, "m\0ad\0None"),
            ({"extra_key": "ad"}, "m\0None\0ad"),
            ({"extra_key": "ad", "model": "adapter"}, "adapter\0None\0ad"),
            ({"lora_path": ["ad", None], "extra_key": [[["x"]]]}, "m\0ad\0None"),
        ):
            assert await made.prompt(prompt=TEXT, **fields) == guessed(TEXT, apart=apart)
        salted = await made.prompt(prompt=TEXT, extra_key="x", cache_salt="s")
        assert salted == guessed(TEXT, apart="m\0None\0x", salt="s")


async def test_a_tokenizer_that_cannot_be_checked_is_used_with_a_warning(
    folder: Path, reference: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(folder=folder) as made:
        assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)
    assert [record.getMessage() for record in caplog.records] == ["The tokenizer could not be checked"]


@pytest.mark.parametrize("content", ["{", "{}", "[]", "\xff"])
async def test_a_tokenizer_that_cannot_be_read_is_told_and_the_engine_asked(
    content: str, tmp_path: Path, reference: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    async with running(TokenizingEngine(reference)) as engine, scene(str(tmp_path), engine.url) as made:
        assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)
    assert caplog.records[0].getMessage() == "The tokenizer cannot be used"
    assert str(tmp_path) in str(caplog.records[0].__dict__["fields"]["reason"])


# -- not at all


async def test_images_are_routed_by_what_stands_for_them(folder: Path, reference: tokenizers.Tokenizer) -> None:
    async with running(TokenizingEngine(reference)) as engine:
        for tokenizer in (folder, None):
            async with scene(url=engine.url, folder=tokenizer) as made:
                prompt = await made.prompt("chat", messages=IMAGE, tools=[])
                assert prompt._replace(begins=None) == guessed([], IMAGE)
                assert made.untokenized("multimodal") == 1
                assert made.asked_engine == 0


async def test_what_is_in_front_of_the_first_image_is_known(folder: Path, reference: tokenizers.Tokenizer) -> None:
    """It was sent as a chat without one: the engine computes only what follows."""
    later = [{"role": "assistant", "content": None, "tool_calls": CALLS}, {**IMAGE[0], "role": "tool"}, *CHAT]
    ids = reference.encode(chat_text(CHAT).removesuffix("assistant\n") + "user\n", add_special_tokens=False).ids
    async with scene(folder=folder) as made:
        for messages in ([*CHAT, *IMAGE], [*CHAT, *IMAGE, *later]):
            prompt = await made.prompt("chat", messages=messages, model="adapter", cache_salt="s")
            assert prompt.begins == known(ids, Namespace("adapter", "s")).hashes
            alone = await made.prompt("chat", messages=messages, model="adapter", cache_salt="s", tools=5)
            assert alone.begins is None
        most = await made.prompt("chat", messages=[{"role": "user", "content": "∀" * 4000}, *IMAGE])
        assert most.begins
        assert most.begins.tokens == most.tokens


async def test_a_chat_goes_on_where_it_was_though_it_has_an_image_now(folder: Path) -> None:
    rank, held = WorkerRank("w", 0), list[int]()
    async with scene(folder=folder) as made:
        chats = [[*CHAT], [*CHAT, *IMAGE], [*CHAT, *IMAGE, *CHAT]]
        said, *shown = [await made.made("chat", msgspec.json.encode({"messages": each})) for each in chats]
        assert said.hashes
        made.context.predict(rank, said.hashes.chain(BLOCK), said.guessed)
        for prompt in shown:
            found = made.context.matches(prompt)
            assert found
            held.append(found[rank].blocks)
            assert prompt.hashes
            made.context.predict(rank, prompt.hashes.chain(BLOCK), prompt.guessed)
        assert 3 < held[0] < MEDIA_TOKENS // BLOCK < held[1]


async def test_a_model_under_any_of_its_names_makes_the_same_of_an_image() -> None:
    async with scene() as made:
        assert await made.prompt("chat", messages=IMAGE, model="") == guessed(IMAGE)
        assert await made.prompt("chat", messages=IMAGE, model="adapter") == guessed(IMAGE, apart="adapter\0None\0None")


@pytest.mark.parametrize(("kind", "alike"), [("vllm", True), ("sglang", False)])
async def test_a_billing_header_is_no_part_of_a_prompt_to_engines_that_remove_it(kind: EngineKind, alike: bool) -> None:
    made: list[Prompt] = []
    async with scene(kind=kind) as at:
        for nonce in ("36ee5", "0aaa9"):
            system = {"role": "system", "content": f"x-anthropic-billing-header: cch={nonce};\n{TEXT}"}
            made.append(await at.prompt("chat", messages=[system, *IMAGE]))
    assert (made[0] == made[1] == guessed([{"role": "system", "content": TEXT}, *IMAGE])) == alike


@pytest.mark.parametrize("template", [SYSTEM_FIRST, CONFIG["chat_template"]])
async def test_what_the_system_says_later_stands_where_the_template_takes_it(tmp_path: Path, template: str) -> None:
    """Claude Code's reminders: in front of all that was said, where engines put them there, and so little is found."""
    reminder = {"role": "system", "content": [{"type": "text", "text": "Some todos are left."}]}
    folder = write_model(tmp_path / "m", {**CONFIG, "chat_template": template})
    async with scene(str(folder)) as made:
        got = made.guess(b"/v1/messages", system=TEXT, tools=[], messages=[*CHAT, reminder, *CHAT])
        merged = guessed(TEXT, reminder["content"], [], [*CHAT, *CHAT])
        assert got == (merged if template == SYSTEM_FIRST else guessed(TEXT, [], [*CHAT, reminder, *CHAT]))
        assert made.guess(b"/v1/messages", messages=CHAT) == guessed(CHAT)
        assert made.guess(b"/v1/messages", messages=5) == guessed()


@pytest.mark.parametrize(
    "answer", [(500, b""), (404, b"{}"), (200, b"nonsense"), (200, b'{"tokens": ["a"]}'), (200, b'{"tokens": [-1]}')]
)
async def test_an_engine_without_an_answer_leaves_the_text(answer: Answer) -> None:
    async with running(HttpEngine({"/tokenize": answer})) as engine, scene(url=engine.url) as made:
        assert await made.prompt(prompt=TEXT) == guessed(TEXT)
        assert (made.untokenized("engine"), made.asked_engine) == (1, 0)


async def test_chats_that_an_engine_tokenizes_otherwise_than_it_serves_them_are_matched_by_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = 200, b'{"tokens": [200006, 1, 2, 3]}'  # gpt-oss's chats begin so
    async with running(HttpEngine({"/tokenize": told})) as engine, scene(url=engine.url) as made:
        made.describe(version="0.30.0")
        for _ in range(2):
            assert await made.prompt("chat", messages=CHAT) == guessed(CHAT)
        assert (made.untokenized("no_template"), made.asked_engine) == (2, 0)
        assert len(engine.asked) == 1  # the second time that is known
        (logged,) = [record for record in caplog.records if record.getMessage() == "Chats are matched by their text"]
        assert logged.__dict__["fields"]["worker"] == "w"
        assert await made.prompt(prompt=TEXT) == known([200006, 1, 2, 3])

        made.describe(version="0.33.0")
        await made.learn()
        assert await made.prompt("chat", messages=CHAT) == known([200006, 1, 2, 3])


async def test_an_engine_that_is_away_leaves_the_text() -> None:
    async with scene() as made:
        assert await made.prompt(prompt=TEXT) == guessed(TEXT)
        assert await made.prompt("chat", messages=CHAT) == guessed(CHAT)
        assert made.untokenized("engine") == 2


async def test_an_engine_that_is_too_slow_leaves_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    never = asyncio.Event()

    async def hang(body: bytes) -> Answer:
        await never.wait()
        return 200, b""

    monkeypatch.setattr("router.prompts.ENGINE_TIMEOUT", 0.02)
    async with running(HttpEngine({"/tokenize": hang})) as engine, scene(url=engine.url) as made:
        assert await made.prompt(prompt=TEXT) == guessed(TEXT)
        assert made.untokenized("engine") == 1


async def test_who_does_not_answer_keeps_no_more_requests_waiting(
    reference: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, never = 0, asyncio.Event()

    async def hang(body: bytes) -> Answer:
        nonlocal asked
        asked += 1
        await never.wait()
        return 200, b""

    monkeypatch.setattr("router.prompts.ENGINE_TIMEOUT", 0.3)
    async with (
        running(HttpEngine({"/tokenize": hang})) as silent,
        running(TokenizingEngine(reference)) as well,
        scene(url=silent.url) as made,
    ):
        for _ in range(4):
            assert await made.prompt(prompt=TEXT) == guessed(TEXT)
        assert (asked, made.untokenized("engine")) == (2, 4)
        monkeypatch.setattr("router.prompts.ENGINE_TIMEOUT", 10.0)
        made.join(well.url)
        assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)
        assert (asked, made.asked_engine) == (2, 1)
    assert [record.__dict__["fields"] for record in caplog.records if "/tokenize" in record.message] == [
        {"worker": "w"}
    ]


async def test_a_chat_that_no_engine_is_asked_about_does_not_keep_one_at_rest(
    reference: tokenizers.Tokenizer,
) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=NOWHERE) as made:
        for _ in range(MOST_UNANSWERED):
            assert await made.prompt(prompt=TEXT) == guessed(TEXT)
        made.worker.spec = msgspec.structs.replace(made.worker.spec, url=engine.url)
        assert await made.prompt(prompt=TEXT) == guessed(TEXT), "it rests"
        made.now += REST
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
        await made.prompt("chat", messages=[image])
        assert made.untokenized("multimodal") == 1
        assert await made.prompt(prompt=TEXT) == known(reference.encode(TEXT).ids)


async def test_an_engine_of_unknown_kind_leaves_the_text() -> None:
    async with scene(kind="unknown") as made:
        assert await made.prompt(prompt=TEXT) == guessed(TEXT)
        assert made.untokenized("engine") == 1


async def test_without_a_worker_there_is_nobody_to_ask() -> None:
    async with scene() as made:
        made.context.fleet.mark_down(made.worker, "gone")
        assert await made.prompt(prompt=TEXT) == Prompt()


@pytest.mark.parametrize("absent", [{}, {"prompt": None}], ids=str)
async def test_embeddings_in_place_of_a_prompt_go_by_load(folder: Path, absent: dict[str, None]) -> None:
    """They are kilobytes for each token, which would make a huge prompt of a small one."""
    async with scene(folder=folder) as made:
        assert await made.prompt(**absent, prompt_embeds="AAAA" * 10_000) == Prompt()
        assert (made.asked_engine, made.untokenized("untold")) == (0, 1)


@pytest.mark.parametrize("prompt", [[], [[]], [{}], [None]], ids=str)
async def test_what_is_no_prompt_is_left_to_the_engine_to_judge(prompt: object) -> None:
    async with scene() as made:
        assert (await made.prompt(prompt=prompt)).hashes is None
        assert made.untokenized("malformed") == 1


@pytest.mark.parametrize(
    "prompt",
    [
        *([-1], [2**31], [2**32], [2**70], [1, "a"], [1, [2]], [1, None], [1, 2.5], [[1], [-1]], [[1], [1, "a"]]),
        *([1.0], ["1", 1], [["1"]]),  # SGLang takes each for the id 1
    ],
    ids=str,
)
async def test_what_is_no_token_id_reaches_no_engine(prompt: object) -> None:
    async with scene() as made:
        with pytest.raises(BadRequest) as caught:
            await made.prompt(prompt=prompt)
        assert caught.value.response.status == 400


async def test_a_token_that_the_model_does_not_have_reaches_no_engine(
    folder: Path, reference: tokenizers.Tokenizer
) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url, folder=folder) as made:
        last = reference.get_vocab_size() - 1
        assert (await made.prompt(prompt=[1, last])).tokens == 2
        with pytest.raises(BadRequest):
            await made.prompt(prompt=[[1, last], [1, last + 1]])


@pytest.mark.parametrize("prompts", [[[1, 2], [3]], [[], [1]], [[{"a": 1}], [3]], [[7], "a", None, {}]])
async def test_what_a_batch_of_inputs_holds_besides_ids_is_for_the_engine_to_judge(prompts: list[object]) -> None:
    async with scene() as made:
        made.prompts.check("m", {"input": [*prompts, [2**31 - 1]]})
        for no_ids in ([2**31], [-1], ["a"], [1.0], [1, "a"]):
            with pytest.raises(BadRequest):
                made.prompts.check("m", {"input": [*prompts, no_ids]})


async def test_to_check_many_short_inputs_takes_little_more_than_to_read_them() -> None:
    """Everybody else waits meanwhile, and a request may be of 64 MB."""
    raw = b"[%s]" % b",".join([b"[1]"] * 50_000)
    batch = msgspec.json.decode(raw)
    async with scene() as made:
        reading = seconds(lambda: msgspec.json.decode(raw))
        assert seconds(lambda: made.prompts.check("m", {"input": batch})) < 8 * reading


def seconds(work: Callable[[], object]) -> float:
    took = []
    for _ in range(5):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


async def test_a_number_that_no_float_holds_is_left_to_the_engine_to_judge() -> None:
    async with scene() as made:
        assert (await made.prompt_of("completions", b'{"model": "m", "prompt": [1], "seed": 1e999}')) == known([1])
        assert (await made.prompt_of("completions", b'{"model": "m", "prompt": [1e999]}')).hashes is None
        assert (await made.prompt_of("completions", b'{"model": "m", "prompt": "a", "seed": 1e999}')).hashes is None
        assert made.untokenized("malformed") == 2


@pytest.mark.parametrize("raw", [b'{"model": "m", "prompt": "a\xff"}', b'{"model": "m", "prompt": "a", "\xff": 1}'])
async def test_text_that_is_not_utf_8_is_refused(raw: bytes) -> None:
    async with scene() as made:
        with pytest.raises(BadRequest) as caught:
            await made.prompt_of("completions", raw)
    assert caught.value.response.status == 400
    assert msgspec.json.decode(caught.value.response.body)["error"]["code"] == "invalid_json"


# -- too long


def too_long(error: BadRequest) -> tuple[int, str, str]:
    answer = msgspec.json.decode(error.response.body)["error"]
    return error.response.status, answer["code"], answer["param"]


async def test_a_prompt_longer_than_the_model_takes_is_refused(folder: Path, reference: tokenizers.Tokenizer) -> None:
    length = len(reference.encode(chat_text(CHAT), add_special_tokens=False).ids)
    async with scene(folder=folder, max_model_len=length) as made:
        await made.prompt("chat", messages=CHAT)
        await made.prompt(prompt=[1] * length)
        for model in ("m", "adapter"):
            with pytest.raises(BadRequest) as caught:
                await made.prompt(model=model, prompt=[1] * (length + 1))
            assert too_long(caught.value) == (400, "context_length_exceeded", "prompt")
        with pytest.raises(BadRequest) as caught:
            await made.prompt("chat", messages=[*CHAT, *CHAT])
        assert too_long(caught.value) == (400, "context_length_exceeded", "messages")
        # As OpenAI and vLLM begin it: some clients know by this that the prompt must be shorter.
        assert str(caught.value).startswith(f"This model's maximum context length is {length} tokens. ")


async def test_so_is_one_that_an_engine_counted(reference: tokenizers.Tokenizer) -> None:
    async with running(TokenizingEngine(reference)) as engine, scene(url=engine.url, max_model_len=3) as made:
        with pytest.raises(BadRequest) as caught:
            await made.prompt(prompt=TEXT)
    assert too_long(caught.value) == (400, "context_length_exceeded", "prompt")


async def test_a_worker_that_cuts_prompts_gets_any() -> None:
    """SGLang with --allow-auto-truncate."""
    async with scene(max_model_len=10) as made:
        assert made.worker.description is not None
        made.worker.description = msgspec.structs.replace(made.worker.description, cuts_prompts=True)
        inference = parse_inference("completions", msgspec.json.encode({"prompt": [1] * 11}))
        routing = RequestRouting(made.context, None)
        assert made.prompts.prepare(inference, routing) is None
        assert len(routing.candidates()) == 1


async def test_workers_that_take_less_than_others_get_no_prompt_that_is_too_long_for_them() -> None:
    async with scene(max_model_len=20) as made:
        small = Worker(parse_worker(f"{NOWHERE},name=small"), Pool(NOWHERE, 1.0))
        small.description = EngineDescription("vllm", models=(Model("m", max_model_len=10),), block_size=BLOCK)
        made.context.fleet.add(small)
        made.context.fleet.mark_up(small)
        for tokens, more, ranks in ((10, {}, 2), (11, {}, 1), (5, {"max_tokens": 5}, 2), (5, {"max_tokens": 6}, 1),
                                    (19, {"max_tokens": 9}, 1)):  # fmt: skip
            inference = parse_inference("completions", msgspec.json.encode({"prompt": [1] * tokens, **more}))
            routing = RequestRouting(made.context, None)
            assert made.prompts.prepare(inference, routing) is None
            assert len(routing.candidates()) == ranks
        for path, prompt, limit in ((b"/generate", "input_ids", "max_new_tokens"),
                                    (b"/inference/v1/generate", "token_ids", "max_tokens")):  # fmt: skip
            for wanted, ranks in ((5, 2), (6, 1)):
                inference = GENERATE[path](msgspec.json.encode({prompt: [1] * 5, "sampling_params": {limit: wanted}}))
                routing = RequestRouting(made.context, None)
                assert made.prompts.prepare(inference, routing) is None
                assert len(routing.candidates()) == ranks
        with pytest.raises(BadRequest):
            await made.prompt(prompt=[1] * 21)


# -- silence

SECRET = "the-password-is-swordfish"


async def test_nothing_of_a_prompt_is_ever_logged(
    folder: Path, reference: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = [{"role": "user", "content": SECRET}]
    parts = [{"type": "text", "text": SECRET}, {"type": "image_url", "image_url": {"url": SECRET}}]
    requests: list[tuple[Endpoint, dict[str, Any]]] = [
        ("completions", {"prompt": SECRET}),
        ("completions", {"prompt": [1, SECRET]}),
        ("completions", {"prompt": SECRET, "add_special_tokens": SECRET}),
        ("chat", {"messages": said}),
        ("chat", {"messages": said, "chat_template": "{{ " + SECRET}),
        ("chat", {"messages": said, "tools": [SECRET]}),
        ("chat", {"messages": [{"role": "user", "content": parts}]}),
        ("chat", {"messages": [SECRET]}),
    ]
    broken = HttpEngine({"/tokenize": (500, SECRET.encode())})
    async with running(TokenizingEngine(reference)) as engine, running(broken):
        for url in (engine.url, broken.url, NOWHERE):
            for tokenizer in (folder, None):
                async with scene(url=url, folder=tokenizer, max_model_len=4) as made:
                    for endpoint, fields in requests:
                        try:
                            await made.prompt(endpoint, **fields)
                        except BadRequest as error:
                            assert SECRET.encode() not in error.response.body  # noqa: PT017 -- only some are refused
    assert caplog.records
    assert not [record for record in caplog.records if SECRET in JsonFormatter().format(record)]
