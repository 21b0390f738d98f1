"""Which engines accept prompts as token ids (`--send-token-ids`): tried once, when a worker comes up."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from engines.pretokenized import QUESTION_PATH, question, took_ids
from publishers.logs import log_event
from router.tokens import CannotTokenize, EngineTokens, Post
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

TIMEOUT: Final = 10.0
"""Seconds that the trial may take for its one token: a busy engine computes other prompts first."""


class TokenTakers:
    def __init__(self) -> None:
        self._takes: dict[str, dict[str, bool]] = {}
        """Whether the engine accepts token ids, by base model and worker."""
        self._models: frozenset[str] = frozenset()

    def take(self, model: str) -> bool:
        """Whether all engines that serve this base model accept token ids: a request may have to be sent to another
        worker, or to two."""
        return model in self._models

    async def learn(self, worker: Worker, model: str, tokens: EngineTokens, post: Post) -> None:
        took = await _took(worker, model, tokens, post)
        if not took:
            why = "the engine makes the tokens of chats itself; vLLM 0.32 takes them"
            log_event(logger, logging.WARNING, "Prompts go as text", model=model, worker=worker.id, reason=why)
        self._takes.setdefault(model, {})[worker.id] = took
        self._settle()

    def forget(self, worker_id: str, still: Collection[str] = ()) -> None:
        """The worker has left, or serves only the models in `still`."""
        for model, workers in self._takes.items():
            if model not in still:
                workers.pop(worker_id, None)
        self._settle()

    def _settle(self) -> None:
        self._models = frozenset(model for model, takes in self._takes.items() if takes and all(takes.values()))


async def _took(worker: Worker, model: str, tokens: EngineTokens, post: Post) -> bool:
    if worker.engine != "vllm":
        return False
    try:
        ids = await tokens.ids("completions", {"model": model, "prompt": "Yes"})
    except CannotTokenize:
        return False
    return bool(ids) and took_ids(*await post(QUESTION_PATH, question(model, ids)))
