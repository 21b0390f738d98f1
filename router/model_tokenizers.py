"""The tokenizer of each base model: found once, compared with each engine that serves it, and dropped with the last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Set
from typing import Final

from engines.description import EngineKind, Model, bases
from publishers.logs import log_event
from router.context import RouterContext
from router.settings import SettingsError
from router.tokens import CannotTokenize, EngineTokens, PromptTokens, Tokenizer, find_tokenizer, load_tokenizer, verify
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

_STRICTEST: Final[tuple[EngineKind, ...]] = ("sglang", "vllm")
"""Kinds of engine, from the one for which least is tokenized here."""


class ModelTokenizers:
    def __init__(
        self,
        setting: str,
        context: RouterContext,
        engine: Callable[[Worker], EngineTokens],
        folders: Sequence[str] = (),
    ) -> None:
        """`setting`: `--tokenizer`; `folders`: `--model-folder`. `engine`: asks a worker's engine for tokens."""
        self._setting = setting
        self._context = context
        self._engine = engine
        self._folders = folders
        self.prompt_tokens: dict[str, PromptTokens] = {}
        """By base model, what tokenizes its prompts here; engines are asked for those of other models."""
        self._found: dict[str, Tokenizer | None] = {}
        """By base model, its tokenizer; None: there is none, or it cannot be used."""
        self._serving: dict[str, set[str]] = {}
        """By base model, the workers that serve it, as they were described last."""
        self._differing: dict[str, set[str]] = {}
        """By base model, those whose engine makes other tokens than its tokenizer here."""
        self._finding = asyncio.Lock()

    def has_found(self, model: str) -> bool:
        """Whether there is a tokenizer of the base model here, though engines may make other tokens."""
        return self._found.get(model) is not None

    def tokenizer(self, model: str) -> Tokenizer | None:
        """That of a base model; None also if an engine makes other tokens."""
        return None if self._differing.get(model) else self._found.get(model)

    async def learn(self, worker: Worker) -> None:
        """A worker has been described: load its models' tokenizers, each once, and compare them with its engine."""
        for model in bases(worker.models):
            self._serving.setdefault(model.id, set()).add(worker.id)
        for model in bases(worker.models):
            async with self._finding:  # workers come at once: the others take what the first finds
                if model.id not in self._found:
                    self._found[model.id] = await self._find(worker, model)
            tokenizer = self._found[model.id]
            if tokenizer is not None:
                await self._compare(worker, model, tokenizer)

    def forget(self, worker_id: str, still: Set[str] = frozenset()) -> None:
        """The worker has left, or serves only the models in `still`."""
        for model in self._serving.keys() - still:
            serving, differing = self._serving[model], self._differing.get(model, set())
            was_settled = worker_id in differing or model in self.prompt_tokens
            serving.discard(worker_id)
            differing.discard(worker_id)
            if not serving:
                self._drop(model)
            elif was_settled:
                self._settle(model)

    def _drop(self, model: str) -> None:
        """No worker serves the model any more: a later one of that name may have another tokenizer."""
        del self._serving[model]
        self._found.pop(model, None)
        self._differing.pop(model, None)
        self.prompt_tokens.pop(model, None)

    async def _find(self, worker: Worker, model: Model) -> Tokenizer | None:
        path = worker.description.tokenizer_path if worker.description else None
        try:
            folder = await asyncio.to_thread(find_tokenizer, self._setting, [model], path, within=self._folders)
            tokenizer = await asyncio.to_thread(load_tokenizer, folder) if folder else None
        except (SettingsError, ValueError, OSError) as error:
            log_event(logger, logging.ERROR, "The tokenizer cannot be used", model=model.id, reason=error)
            tokenizer = None
        if tokenizer is None and self._setting != "engine":
            advice = "each prompt is tokenized by asking an engine; --tokenizer PATH makes it cheaper"
            log_event(logger, logging.WARNING, "No tokenizer is at hand", model=model.id, hence=advice)
        return tokenizer

    async def _compare(self, worker: Worker, model: Model, tokenizer: Tokenizer) -> None:
        differing = self._differing.setdefault(model.id, set())
        if await self._agrees(worker, model, tokenizer):
            differing.discard(worker.id)
        else:
            differing.add(worker.id)
        self._settle(model.id)

    async def _agrees(self, worker: Worker, model: Model, tokenizer: Tokenizer) -> bool:
        """An engine that cannot be asked is taken to agree, which is logged."""
        try:
            mismatch = await verify(PromptTokens(tokenizer, worker.engine), self._engine(worker), model.id)
        except CannotTokenize as error:
            log_event(logger, logging.WARNING, "The tokenizer could not be checked", model=model.id, reason=error)
            return True
        if mismatch is None:
            return True
        self._context.metrics.tokenizer_mismatches.labels(model.id).inc()
        text = "The tokenizer is not the engine's: prompts are tokenized by asking an engine instead"
        log_event(logger, logging.ERROR, text, model=model.id, worker=worker.id, where=mismatch)
        return False

    def _settle(self, model: str) -> None:
        """Which workers serve the model, or whose engine differs, may have changed: what tokenizes its prompts from now
        on. If engines of both kinds serve it, only what both tokenize alike is tokenized here."""
        tokenizer = self.tokenizer(model)
        if tokenizer is None:
            self.prompt_tokens.pop(model, None)
            return
        if model not in self.prompt_tokens:
            log_event(logger, logging.INFO, "Tokenizer is ready", model=model, backend=tokenizer.backend)
        serving = self._serving[model]
        kinds = {worker.engine for worker in self._context.fleet.workers.values() if worker.id in serving}
        strictest: EngineKind = next((kind for kind in _STRICTEST if kind in kinds), "unknown")
        self.prompt_tokens[model] = PromptTokens(tokenizer, strictest)
