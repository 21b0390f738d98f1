"""Gets a request's prompt as token ids: from the model's own tokenizer, else by asking an engine, else not at all.

Which of the first two serves a model is logged once. A request whose tokens neither can tell is counted, and is matched
by what stands for its prompt (`_guess`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import numpy as np

from engines.description import Model, bases
from engines.disaggregation.legs import answer_limit, read_body
from engines.pretokenized import with_ids
from indexer.hashing import Tokens, pack_tokens
from indexer.types import Namespace
from publishers.dialogue import read_whole
from publishers.logs import log_event
from router.answering import Answering
from router.context import Prompt, RouterContext
from router.model_tokenizers import ModelTokenizers
from router.openai.errors import BadRequest
from router.openai.inference import Inference
from router.routing import RequestRouting
from router.scheduling.others import Others
from router.token_takers import TIMEOUT, TokenTakers
from router.tokens import (
    BYTES_PER_TOKEN,
    CannotTokenize,
    EngineTokens,
    Fields,
    Post,
    PromptTokens,
    Reason,
    first_prompt,
    other_tokens,
    read_ids,
    stand_ins,
)
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

_IDS_ONLY: Final = ("input_ids", "token_ids")
"""Fields that hold no text."""
_APART: Final = ("lora_path", "extra_key")
"""SGLang's fields that keep the caches of equal prompts apart."""
_TAKEN_FOR_IDS: Final = frozenset((int, bool, float, str))
"""In a list, by some engine."""
LONG = 128 * 1024
"""Bytes of a request from which on another thread tokenizes it: that takes milliseconds, and answers go on meanwhile,
as tokenizers release Python's lock. Shorter ones take less time than the way to another thread and back."""
ENGINE_TIMEOUT = 2.0
"""Seconds an engine has to answer /tokenize; a request that outlasts them is matched by its text."""


class Prompts:
    def __init__(
        self,
        setting: str,
        context: RouterContext,
        session: aiohttp.ClientSession,
        folders: Sequence[str] = (),
        *,
        send_ids: bool = False,
    ) -> None:
        """`setting`: `--tokenizer`; `folders`: `--model-folder`; `send_ids`: `--send-token-ids`."""
        self._context = context
        self._session = session
        self._takers = TokenTakers() if send_ids else None
        self._answering = Answering(context.clock)
        self._render_otherwise: set[str] = set()
        """Workers whose engine, asked for the tokens of a chat, tells others than those that it computes."""
        self._executor = ThreadPoolExecutor(1, "long-prompts")
        """One thread, so that many long prompts take turns instead of all processors."""
        self._ids_only = PromptTokens(None)
        """For models without a tokenizer: takes only prompts that are token ids already."""
        self._models = ModelTokenizers(setting, context, self._engine, folders)
        read_ids(b"[1]")  # compiles it, before any request

    def prepare(self, inference: Inference, routing: RequestRouting) -> Awaitable[None] | None:
        """Give `routing` its prompt: at once, returning None, or by the time the returned awaitable is done. Raises
        BadRequest if it is too long."""
        try:
            fields = inference.fields()
        except msgspec.ValidationError:  # strange, but for the engine to judge
            self._give_up(routing, inference, "malformed", {})
            return None
        if inference.endpoint == "completions" and "prompt" not in fields:
            # Embeddings: kilobytes for each token, so that the body's size says nothing of their number.
            self._context.metrics.untokenized.labels("untold").inc()
            return None
        base = self._base(inference.model)
        if inference.endpoint == "completions":
            fields["prompt"] = self._checked(fields["prompt"], base, inference.prompt_field)
        elif fields.get("input_ids") is not None:
            fields["input_ids"] = self._checked(fields["input_ids"], base, "input_ids")
        tokens = self._models.prompt_tokens.get(base.id, self._ids_only) if base else self._ids_only
        if len(inference.raw) >= LONG:
            return self._prepare_long(tokens, inference, base, routing, fields)
        return self._take(_tokenized(tokens, inference, fields), inference, base, routing, fields)

    def check(self, model: str | None, inputs: Mapping[str, Any]) -> None:
        """Raises BadRequest for token ids of a request for embeddings and the like that are none of the model's."""
        base = self._base(model)
        for name, given in inputs.items():
            self._checked([_joined(given)] if _is_batch(given) else given, base, name)

    async def learn(self, worker: Worker) -> None:
        """A worker has been described: find out how its models' prompts are tokenized, and whether it takes tokens."""
        self.forget(worker.id, still={model.id for model in bases(worker.models)})
        await self._models.learn(worker)
        if self._takers is None:
            return
        for model in bases(worker.models):
            if self._models.has_found(model.id):
                await self._takers.learn(worker, model.id, self._engine(worker), self._post_to(worker, TIMEOUT))

    def forget(self, worker_id: str, still: Set[str] = frozenset()) -> None:
        """The worker has left, or serves only the models in `still`: how it tokenizes others is of no more use."""
        self._answering.forget(worker_id)
        self._render_otherwise.discard(worker_id)
        self._models.forget(worker_id, still)
        if self._takers:
            self._takers.forget(worker_id, still)

    def ends(self, model: str) -> Callable[[Sequence[int]], bool] | None:
        """Tells whether tokens of a base model end with a whole character; None if it has no tokenizer here."""
        tokenizer = self._models.tokenizer(model)
        return tokenizer.ends_whole if tokenizer else None

    # -- one request

    def _base(self, model: str | None) -> Model | None:
        """Also that of a model whose workers are down, if its requests may be held until one is up."""
        fleet = self._context.fleet
        return fleet.base_model(model) or (fleet.base_of_down(model) if self._context.outage else None)

    async def _prepare_long(
        self, tokens: PromptTokens, inference: Inference, base: Model | None, routing: RequestRouting, fields: Fields
    ) -> None:
        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(self._executor, _tokenized, tokens, inference, fields)
        asked = self._take(made, inference, base, routing, fields)
        if asked:
            await asked

    def _take(
        self,
        made: Tokens | _Untold,
        inference: Inference,
        base: Model | None,
        routing: RequestRouting,
        fields: Fields,
    ) -> Awaitable[None] | None:
        """What `prepare` does, and returns, once `_tokenized` has `made` something of the prompt."""
        if isinstance(made, _Untold):
            if made.why.engine_can:
                return self._ask(inference, base, routing, fields)
            self._give_up(routing, inference, made.why.reason, fields)
            if made.begins is not None:
                self._set_beginning(routing, inference, made.begins)
            return None
        self._set_prompt(routing, inference, base, made, fields)
        # Who comes back may take other things than who went down.
        if self._takers and base and self._takers.take(base.id) and self._context.fleet.base_model(inference.model):
            self._send_ids(routing, inference, fields, made)
        return None

    def _checked(self, prompt: Any, base: Model | None, param: str) -> Any:
        """`prompt` with its token ids as arrays. Refuses ids that a client made itself: SGLang 0.5 dies of one that its
        model does not have, and a retry would take the next worker with it."""
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._models.tokenizer(base.id) if base else None
        limit = tokenizer.vocabulary if tokenizer else 2**31
        batch = _is_batch(prompt)
        may_be_text = not batch and param not in _IDS_ONLY
        try:
            packed = [_packed(ids, may_be_text) for ids in (prompt if batch else [prompt])]
            known = all(int(ids.max()) < limit for ids in packed if isinstance(ids, np.ndarray))
        except (OverflowError, TypeError):
            known = False
        if not known:
            raise BadRequest(400, "The prompt holds something that is no token id of this model.", param=param)
        return packed if batch else packed[0]

    def _set_prompt(
        self,
        routing: RequestRouting,
        inference: Inference,
        base: Model | None,
        ids: Sequence[int] | Tokens,
        fields: Fields,
    ) -> None:
        if base:
            routing.too_short = self._too_short(base.id, inference, len(ids))
        namespace = self._context.fleet.namespace(inference.model, inference.cache_salt)
        routing.prompt = _with_others(self._context.hash_prompt(ids, namespace), inference, fields)

    def _set_beginning(self, routing: RequestRouting, inference: Inference, ids: Tokens) -> None:
        """Of a chat with an image: the text in front of the first one has tokens that can be known, and may have been
        sent before, when there was no image yet. They are looked up too, but never more of them than stand for the
        whole prompt."""
        namespace = self._context.fleet.namespace(inference.model, inference.cache_salt)
        begins = self._context.hash_prompt(ids[: routing.prompt.tokens], namespace)
        routing.prompt = routing.prompt._replace(begins=begins.hashes)

    def _send_ids(self, routing: RequestRouting, inference: Inference, fields: Fields, ids: Tokens) -> None:
        """Send the ids, so that the engine need not tokenize again. Not for a batch: only its first prompt is tokenized
        here."""
        if inference.engine or (inference.endpoint == "completions" and not isinstance(fields["prompt"], str)):
            return
        body = with_ids(inference.endpoint, inference.raw, ids)
        if body:
            routing.rewrite(body)
            self._context.metrics.ids_sent.inc()

    def _too_short(self, base: str, inference: Inference, tokens: int) -> frozenset[str]:
        """Workers whose context is too short for so many tokens and the answer. Raises BadRequest if the prompt alone
        is too long for all of them."""
        lengths = self._context.fleet.context_lengths(base)
        if lengths.most is not None and tokens > lengths.most:
            raise BadRequest(
                400,
                # Clients that shorten their prompt and try again look for these words, which OpenAI and vLLM use.
                f"This model's maximum context length is {lengths.most} tokens. "
                f"However, your prompt has {tokens} tokens.",
                code="context_length_exceeded",
                param=inference.prompt_field,
            )
        if lengths.least is None or lengths.least == lengths.most:
            return frozenset()
        wanted = tokens + (answer_limit(read_body(inference.raw)) or 0)  # engines refuse both together
        return lengths.under(wanted if lengths.most is None else min(wanted, lengths.most))

    async def _ask(self, inference: Inference, base: Model | None, routing: RequestRouting, fields: Fields) -> None:
        worker = routing.idlest_worker(self._answering.resting())
        if worker is None:
            # Where none is up either, the answer will be that nobody can serve it, unless the request is held then.
            if self._context.outage or routing.idlest_worker(frozenset()):
                self._give_up(routing, inference, "engine", fields)
            return
        if inference.endpoint == "chat" and worker.id in self._render_otherwise:
            self._give_up(routing, inference, "no_template", fields)
            return
        try:
            ids = await self._noted(worker).ids(inference.endpoint, inference.whole())
        except CannotTokenize as error:
            if error.reason == "no_template" and worker.id not in self._render_otherwise:
                self._render_otherwise.add(worker.id)
                log_event(logger, logging.WARNING, "Chats are matched by their text", worker=worker.id, reason=error)
            self._give_up(routing, inference, error.reason, fields)
            return
        except msgspec.ValidationError:
            self._give_up(routing, inference, "malformed", {})
            return
        self._context.metrics.engine_tokenized.inc()
        self._set_prompt(routing, inference, base, ids, fields)

    def _give_up(self, routing: RequestRouting, inference: Inference, reason: Reason, fields: Fields) -> None:
        """Match by text what has no token ids. `fields`: as far as they could be read."""
        self._context.metrics.untokenized.labels(reason).inc()
        routing.prompt = Prompt(len(inference.raw) // BYTES_PER_TOKEN)
        if reason == "malformed":
            return
        said = {**fields, "cache_salt": inference.cache_salt}
        try:
            if inference.endpoint == "completions":
                said["prompt"] = first_prompt(fields["prompt"])
        except CannotTokenize:  # for the engine to judge
            return
        self._guess(routing, inference.model, said, ("prompt", "media", "tools", "messages"))
        routing.prompt = _with_others(routing.prompt, inference, fields)

    def guess(self, routing: RequestRouting, model: str | None, fields: Fields, rendered: Sequence[str]) -> None:
        """Gives `routing` what stands for the prompt of a request that every engine renders in its own way: `rendered`
        names what the model sees of `fields`, in order."""
        self._context.metrics.untokenized.labels("api").inc()
        base = self._base(model)
        tokenizer = self._models.tokenizer(base.id) if base else None
        if tokenizer and tokenizer.templates and not tokenizer.templates.takes_system_later:
            fields = _system_first(fields)
        self._guess(routing, model, fields, rendered)

    def _guess(self, routing: RequestRouting, model: str | None, fields: Fields, rendered: Sequence[str]) -> None:
        fleet = self._context.fleet
        billed = bool(fleet.other_engines("vllm"))
        said = stand_ins([fields[name] for name in rendered if name in fields], billed=billed)
        served = fleet.prompt_name(model)
        # With the zeros it is no adapter's name, so that stand-ins are nobody's tokens.
        apart = "\0".join(str(each) for each in (served, *(_text(fields.get(name)) for name in _APART)))
        routing.prompt = self._context.guess_prompt(said, Namespace(apart, _text(fields.get("cache_salt"))))

    # -- engines

    def _engine(self, worker: Worker) -> EngineTokens:
        return EngineTokens(worker.engine, self._post_to(worker, ENGINE_TIMEOUT), _version(worker))

    def _noted(self, worker: Worker) -> EngineTokens:
        """As `_engine`, and notes in `_answering` when the engine is asked, and whether it answers."""
        post = self._post_to(worker, ENGINE_TIMEOUT)

        async def noted(path: str, body: bytes) -> tuple[int, bytes]:
            self._answering.asked(worker.id)
            status, answer = await post(path, body)
            note = self._answering.forget if status else self._answering.silent
            note(worker.id)
            return status, answer

        return EngineTokens(worker.engine, noted, _version(worker))

    def _post_to(self, worker: Worker, seconds: float) -> Post:
        async def post(path: str, body: bytes) -> tuple[int, bytes]:
            timeout = aiohttp.ClientTimeout(seconds)
            headers = {"content-type": "application/json"}
            try:
                async with self._session.post(
                    worker.spec.url + path, data=body, headers=headers, timeout=timeout
                ) as answer:
                    return answer.status, await read_whole(answer)
            except (aiohttp.ClientError, TimeoutError):
                return 0, b""

        return post


def _version(worker: Worker) -> str | None:
    return worker.description.version if worker.description else None


def _system_first(fields: Fields) -> Fields:
    """The fields of /v1/messages, with what the system says between the messages moved behind what it says before them:
    vLLM (0.32) and SGLang (0.5.23) render it there if the model's template refuses it later. So each reminder that a
    client adds changes the prompt of all messages."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return fields
    by_system = [isinstance(message, dict) and message.get("role") == "system" for message in messages]
    told = [message.get("content") for message, is_told in zip(messages, by_system, strict=True) if is_told]
    others = [message for message, is_told in zip(messages, by_system, strict=True) if not is_told]
    return {**fields, "system": [fields.get("system"), told], "messages": others} if told else fields


def _text(given: Any) -> str | None:
    """A field's text; the first prompt's in a batch, where each prompt may have one of its own. None for anything that
    engines do not take as text."""
    first = given[0] if isinstance(given, list) and given else given
    return first if isinstance(first, str) else None


class _Untold(NamedTuple):
    """Why a prompt cannot be tokenized, and the tokens that it begins with, if some can be known."""

    why: CannotTokenize
    begins: Tokens | None = None


def _tokenized(tokens: PromptTokens, inference: Inference, fields: Fields) -> Tokens | _Untold:
    try:
        return tokens.tokens(inference.endpoint, fields, len(inference.raw))
    except CannotTokenize as error:
        shown = inference.endpoint == "chat" and error.reason == "multimodal"
        return _Untold(error, _before_media(tokens, inference, fields) if shown else None)


def _before_media(tokens: PromptTokens, inference: Inference, fields: Fields) -> Tokens | None:
    try:
        return tokens.before_media(fields, len(inference.raw))
    except CannotTokenize:
        return None


def _with_others(prompt: Prompt, inference: Inference, fields: Fields) -> Prompt:
    """`prompt`, which is the request's first, together with what the request asks for besides."""
    prompts = fields.get("prompt")
    if isinstance(prompts, list) and len(prompts) > 1:
        further = len(prompts) * inference.choices - 1
        return prompt._replace(others=Others(further, other_tokens(prompts, uncached=inference.uncached)))
    return prompt._replace(others=Others(inference.choices - 1)) if inference.choices > 1 else prompt


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list)


def _joined(batch: Iterable[Any]) -> list[Any]:
    """The prompts of a batch as one, but those that cannot be ids: there may be millions of a token each, and to look
    at one by one takes seconds, in which nobody else is served."""
    lists = (ids for ids in batch if type(ids) is list and ids)
    return list(chain.from_iterable(ids for ids in lists if type(ids[0]) in _TAKEN_FOR_IDS))


def _packed(prompt: Any, may_be_text: bool) -> Any:
    """Token ids as an array; anything that cannot be ids as it is, for the engine to judge. Raises OverflowError or
    TypeError for a list that an engine may take for ids although it holds others: SGLang reads "1" and 1.0 as 1."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if type(first) not in _TAKEN_FOR_IDS:
        return prompt
    texts = may_be_text and all(isinstance(each, str) for each in prompt)
    return prompt if texts else pack_tokens(prompt)
