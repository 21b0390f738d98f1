"""A request's prompt as token ids: by the model's own tokenizer at once, else by asking an engine, else not at all.

What was decided for a model (its own tokenizer, or the engines) is said once in the log, and counted per request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeGuard, cast

import aiohttp
import msgspec
import numpy as np

from engines.description import EngineKind, Model
from indexer.hashing import Tokens, pack_tokens
from indexer.types import Namespace
from publishers.dialogue import read_whole
from publishers.logs import log_event
from router.fleet import Worker
from router.inference import Inference
from router.openai_errors import BadRequest
from router.routing import Brain, Prompt, RequestRouting
from router.settings import SettingsError
from router.tokens import (
    CannotTokenize,
    EngineTokens,
    PromptTokens,
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
    read_ids,
    verify,
)

logger = logging.getLogger("router.prompts")

ENGINE_TIMEOUT = 2.0
"""Seconds an engine has to answer /tokenize; a request that outlasts them is routed by load."""
BYTES_PER_TOKEN = 4
"""Of English text in a JSON body, roughly: to weigh a prompt whose tokens are not known."""


class Prompts:
    def __init__(self, setting: str, brain: Brain, session: aiohttp.ClientSession, folders: Sequence[str] = ()) -> None:
        """`setting`: `--tokenizer`; `folders`: `--model-folder`."""
        self._setting = setting
        self._brain = brain
        self._session = session
        self._folders = folders
        self._by_model: dict[str, PromptTokens] = {}
        self._tokenizers: dict[str, Tokenizer | None] = {}
        self._ids_only = PromptTokens(None)
        read_ids(b"[1]")  # compiles it, before any request

    def prepare(self, inference: Inference, routing: RequestRouting) -> Awaitable[None] | None:
        """Gives `routing` its prompt, at once (None) or when the awaitable is done. BadRequest: it is too long."""
        try:
            fields = inference.fields()
        except msgspec.ValidationError:  # strange, but for the engine to judge
            self._give_up(routing, inference, "malformed")
            return None
        base = self._brain.fleet.base_model(inference.model)
        tokens = self._by_model.get(base.id, self._ids_only) if base else self._ids_only
        try:
            if inference.endpoint == "completions":
                fields["prompt"] = self._checked(fields["prompt"], base)
            self._tell(routing, inference, base, tokens.tokens(inference.endpoint, fields))
        except CannotTokenize as error:
            if error.engine_can:
                return self._ask(inference, base, routing)
            self._give_up(routing, inference, error.reason)
        return None

    async def learn(self, worker: Worker) -> None:
        """A worker was described: find its models' tokenizers, each once, and hold them against this engine's own."""
        for model in worker.models:
            if model.parent is not None:
                continue
            if model.id not in self._tokenizers:
                self._tokenizers[model.id] = await self._find(worker, model)
            tokenizer = self._tokenizers[model.id]
            if tokenizer is None:
                continue
            agrees = await self._agrees(worker, model, tokenizer)
            if agrees and self._tokenizers.get(model.id) is tokenizer:  # another engine may have differed meanwhile
                self._use(model, tokenizer, worker)
            elif not agrees:
                self._tokenizers[model.id] = None
                self._by_model.pop(model.id, None)

    def ends(self, model: str) -> Callable[[Sequence[int]], bool] | None:
        """Whether tokens of a base model end with a whole character; None where it has no tokenizer here."""
        tokenizer = self._tokenizers.get(model)
        return tokenizer.ends_whole if tokenizer else None

    # -- one request

    def _checked(self, prompt: Any, base: Model | None) -> Any:
        """`prompt` with its token ids as arrays. Refuses ids that a client made itself: SGLang 0.5 dies of one that its
        model does not have, and a retry would take the next worker with it."""
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._tokenizers.get(base.id) if base else None
        limit = tokenizer.vocabulary if tokenizer else 2**31
        batch = isinstance(prompt, list) and prompt and isinstance(prompt[0], list)
        try:
            # pack_tokens refuses what is no number or out of any range
            packed = [pack_tokens(ids) if _starts_with_id(ids) else ids for ids in (prompt if batch else [prompt])]
            known = all(int(ids.max()) < limit for ids in packed if isinstance(ids, np.ndarray))
        except (OverflowError, TypeError):
            known = False
        if not known:
            raise BadRequest(400, "The prompt holds something that is no token id of this model.", param="prompt")
        return packed if batch else packed[0]

    def _tell(
        self, routing: RequestRouting, inference: Inference, base: Model | None, ids: Sequence[int] | Tokens
    ) -> None:
        if base and base.max_model_len and len(ids) > base.max_model_len:
            raise BadRequest(
                400,
                f"The prompt has {len(ids)} tokens, more than the {base.max_model_len} that {base.id!r} takes in all.",
                code="context_length_exceeded",
                param="prompt" if inference.endpoint == "completions" else "messages",
            )
        namespace = Namespace(self._brain.fleet.lora_name(inference.model), inference.cache_salt)
        routing.prompt = self._brain.hash_prompt(cast("Sequence[int]", ids), namespace)

    async def _ask(self, inference: Inference, base: Model | None, routing: RequestRouting) -> None:
        worker = routing.idlest_worker()
        if worker is None:
            return  # the answer will say that nobody can serve it
        try:
            ids = await self._engine(worker).ids(inference.endpoint, inference.whole())
        except CannotTokenize as error:
            self._give_up(routing, inference, error.reason)
            return
        except msgspec.ValidationError:
            self._give_up(routing, inference, "malformed")
            return
        self._brain.metrics.engine_tokenized.inc()
        self._tell(routing, inference, base, ids)

    def _give_up(self, routing: RequestRouting, inference: Inference, reason: str) -> None:
        self._brain.metrics.untokenized.labels(reason).inc()
        routing.prompt = Prompt(len(inference.raw) // BYTES_PER_TOKEN)

    # -- one model

    async def _find(self, worker: Worker, model: Model) -> Tokenizer | None:
        path = worker.description.tokenizer_path if worker.description else None
        try:
            folder = await asyncio.to_thread(find_tokenizer, self._setting, [model], path, within=self._folders)
            tokenizer = await asyncio.to_thread(load_tokenizer, folder) if folder else None
        except (SettingsError, ValueError, OSError) as error:
            log_event(logger, logging.ERROR, "The tokenizer cannot be used", model=model.id, reason=error)
            tokenizer = None
        if tokenizer is None and self._setting != "engine":
            advice = "each prompt is tokenised by asking an engine; --tokenizer PATH makes it cheaper"
            log_event(logger, logging.WARNING, "No tokenizer is at hand", model=model.id, hence=advice)
        return tokenizer

    async def _agrees(self, worker: Worker, model: Model, tokenizer: Tokenizer) -> bool:
        """An engine that cannot be compared with is believed to agree, aloud."""
        try:
            mismatch = await verify(PromptTokens(tokenizer, _kind(worker)), self._engine(worker), model.id)
        except CannotTokenize as error:
            log_event(logger, logging.WARNING, "The tokenizer could not be checked", model=model.id, reason=error)
            return True
        if mismatch is None:
            return True
        self._brain.metrics.tokenizer_mismatches.labels(model.id).inc()
        text = "The tokenizer is not the engine's: prompts are tokenised by asking an engine instead"
        log_event(logger, logging.ERROR, text, model=model.id, worker=worker.id, where=mismatch)
        return False

    def _use(self, model: Model, tokenizer: Tokenizer, worker: Worker) -> None:
        """Where engines of both kinds serve a model, only what both make the same tokens of is tokenised here."""
        if model.id not in self._by_model:
            log_event(logger, logging.INFO, "Tokenizer is ready", model=model.id, backend=tokenizer.backend)
        if model.id not in self._by_model or _kind(worker) == "sglang":
            self._by_model[model.id] = PromptTokens(tokenizer, _kind(worker))

    def _engine(self, worker: Worker) -> EngineTokens:
        async def post(path: str, body: bytes) -> tuple[int, bytes]:
            timeout = aiohttp.ClientTimeout(ENGINE_TIMEOUT)
            headers = {"content-type": "application/json"}
            try:
                async with self._session.post(
                    worker.spec.url + path, data=body, headers=headers, timeout=timeout
                ) as answer:
                    return answer.status, await read_whole(answer)
            except (aiohttp.ClientError, TimeoutError):
                return 0, b""

        return EngineTokens(_kind(worker), post)


def _starts_with_id(prompt: Any) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _kind(worker: Worker) -> EngineKind:
    return worker.description.kind if worker.description else "unknown"
