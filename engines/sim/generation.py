"""What a generation request asks for, read from its body: pure, and the same for both flavours but for refusals."""

from __future__ import annotations

from typing import Any

import msgspec

from engines.answers import UNDECODABLE
from engines.sim.settings import FlavourName, SimSettings
from engines.sim.tokens import Tokenizer
from indexer.hashing import pack_tokens
from indexer.types import Namespace

COMPLETION_TOKENS = 16
"""OpenAI's default max_tokens of /v1/completions, and both engines'."""
MOST_ANSWERS = 16_384
"""To one prompt: vLLM's default, VLLM_MAX_N_SEQUENCES."""
STREAM_OPTIONS = "Stream options can only be defined when `stream=True`."
"""vLLM's words."""
IDS_IN_STREAM = (
    "return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false when using "
    "return_token_ids=true."
)
"""SGLang's words."""
GREEDY = 1e-5
"""Temperatures below it are 0 to vLLM."""


class Refused(Exception):
    """An answer with `status` and an OpenAI-style error object; the flavour shapes it."""

    def __init__(self, status: int, message: str, param: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.value = value


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Wire(msgspec.Struct, frozen=True):
    """What a request says to an engine whose prefill and decode are apart, as it stands in the body."""

    params: dict[str, Any] | None = None
    host: Any = None
    port: Any = None
    room: Any = None
    prefill_rank: Any = None
    batch: bool = False
    """Whether the prompt is a list of prompts."""
    ignore_eos: bool = False
    stops: bool = False


class _Body(msgspec.Struct):
    model: str | None = None
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    temperature: float | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    routed_dp_rank: int | None = None
    stop: Any = None
    stop_token_ids: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    disagg_prefill_dp_rank: Any = None


_decode = msgspec.json.Decoder(_Body).decode


class Asked(msgspec.Struct, frozen=True):
    """A generation request, tokenised."""

    chat: bool
    model: str
    namespace: Namespace
    prompts: list[list[int]]
    max_tokens: list[int]
    """For each prompt, how long its answers are."""
    min_tokens: int
    n: int
    """Answers to each prompt."""
    finish_reason: str
    """`length` where the client or the context sets the length, else `stop`."""
    stream: bool
    stream_options: bool
    """Whether there are any, of a stream or of none."""
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    dp_rank: int | None
    wire: Wire


def read_generation(body: bytes, chat: bool, settings: SimSettings, tokenizer: Tokenizer) -> Asked:
    """Raises Refused."""
    fields = _read(body)
    model = _model(fields, settings)
    prompts = [_chat_tokens(fields, tokenizer)] if chat else _prompt_tokens(fields, tokenizer)
    if not all(prompts):
        raise Refused(400, "The decoder prompt cannot be empty", "messages" if chat else "prompt")
    given = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    lengths = [_answer_length(prompt, given, fields, chat, settings) for prompt in prompts]
    ends_itself = chat and given is None and len(prompts[0]) + lengths[0] < settings.context_length
    options = fields.stream_options or _StreamOptions()
    return Asked(
        chat=chat,
        model=model,
        namespace=Namespace(_adapter(model, settings), fields.cache_salt),
        prompts=prompts,
        max_tokens=lengths,
        min_tokens=fields.min_tokens or 0,
        n=_answers(fields, settings),
        finish_reason="stop" if ends_itself else "length",
        stream=bool(fields.stream),
        stream_options=fields.stream_options is not None,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(fields.return_token_ids),
        dp_rank=fields.routed_dp_rank if settings.flavour == "sglang" else None,
        wire=_wire(fields),
    )


def _wire(fields: _Body) -> Wire:
    prompt = fields.prompt
    return Wire(
        params=fields.kv_transfer_params,
        host=fields.bootstrap_host,
        port=fields.bootstrap_port,
        room=fields.bootstrap_room,
        prefill_rank=fields.disagg_prefill_dp_rank,
        batch=isinstance(prompt, list) and not _is_list_of(int, prompt),
        ignore_eos=bool(fields.ignore_eos),
        stops=bool(fields.stop or fields.stop_token_ids),
    )


def check_together(asked: Asked, flavour: FlavourName) -> None:
    """Raises Refused for fields that engines take each alone, but not together."""
    least, most = asked.min_tokens, min(asked.max_tokens)
    if flavour == "vllm":
        if asked.stream_options and not asked.stream:
            raise Refused(400, STREAM_OPTIONS, "stream_options")
        if least > most:
            raise Refused(400, too_few(least, most))
        return
    if least > most:
        raise Refused(400, f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}.")
    if asked.return_token_ids and asked.chat and asked.stream:
        raise Refused(400, IDS_IN_STREAM)


def too_few(least: int, most: int) -> str:
    """vLLM's words."""
    return f"min_tokens must be less than or equal to max_tokens={most}, got {least}."


def read_tokenize(body: bytes, settings: SimSettings, tokenizer: Tokenizer) -> list[int] | list[list[int]]:
    """Ids of a /tokenize body: of its `messages`, its `prompt`, or (SGLang) each of its prompts. Raises Refused."""
    fields = _read(body)
    _model(fields, settings)
    if fields.messages is not None:
        return tokenizer.encode(_render(fields, tokenizer), bool(fields.add_special_tokens))
    special = fields.add_special_tokens is not False
    if isinstance(fields.prompt, str):
        return tokenizer.encode(fields.prompt, special)
    if settings.flavour == "sglang" and _is_list_of(str, fields.prompt):
        return [tokenizer.encode(str(prompt), special) for prompt in fields.prompt]
    raise Refused(400, "prompt must be a string, or messages be given", "prompt")


def _read(body: bytes) -> _Body:
    try:
        return _decode(body)
    except UNDECODABLE as error:
        raise Refused(400, f"the body cannot be read: {error}") from error


def _model(fields: _Body, settings: SimSettings) -> str:
    known = (settings.model, *settings.loras)
    if fields.model is None:
        return settings.model
    if settings.flavour == "vllm" and fields.model not in known:
        raise Refused(404, f"The model `{fields.model}` does not exist. Valid aliases: {', '.join(known)}.", "model")
    return fields.model


def _answers(fields: _Body, settings: SimSettings) -> int:
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MOST_ANSWERS:
        raise Refused(400, f"n must be from 1 to {MOST_ANSWERS}, got {n}.", "n", n)
    greedy = fields.temperature is not None and fields.temperature < GREEDY
    if n > 1 and greedy and settings.flavour == "vllm":
        raise Refused(400, f"n must be 1 when using greedy sampling, got {n}.", "n", n)
    return n


def _adapter(model: str, settings: SimSettings) -> str | None:
    """vLLM has a name for each adapter; SGLang computes the base model for any but `base:adapter`."""
    prefix = "" if settings.flavour == "vllm" else f"{settings.model}:"
    return next((adapter for adapter in settings.loras if prefix + adapter == model), None)


def _prompt_tokens(fields: _Body, tokenizer: Tokenizer) -> list[list[int]]:
    prompt = fields.prompt
    prompts = [prompt] if isinstance(prompt, str) or _is_list_of(int, prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise Refused(400, "prompt must be text, token ids, or a list of either, and not be empty", "prompt")
    return [_one_prompt(each, fields, tokenizer) for each in prompts]


def _one_prompt(prompt: Any, fields: _Body, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, fields.add_special_tokens is not False)
    if _is_list_of(int, prompt):
        return _checked(prompt)
    raise Refused(400, "prompt must be text, token ids, or a list of either", "prompt")


def _chat_tokens(fields: _Body, tokenizer: Tokenizer) -> list[int]:
    """vLLM takes the ids of a chat that was tokenised before; the template is skipped then."""
    ids: Any = (fields.kv_transfer_params or {}).get("prompt_token_ids")
    if _is_list_of(int, ids):
        return _checked(ids)
    return tokenizer.encode(_render(fields, tokenizer), False)


def _render(fields: _Body, tokenizer: Tokenizer) -> str:
    if not fields.messages:
        raise Refused(400, "messages must not be empty", "messages")
    variables: dict[str, Any] = {**(fields.chat_template_kwargs or {})}
    if fields.tools:
        variables["tools"] = fields.tools
    try:
        return tokenizer.render(fields.messages, fields.add_generation_prompt, variables)
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(400, f"messages do not fit the chat template: {error}", "messages") from error


def _is_list_of(kind: type, value: Any) -> bool:
    """Judged by the first item: looking at all of a long prompt costs more than decoding it did."""
    return isinstance(value, list) and bool(value) and type(value[0]) is kind


def _checked(tokens: list[int]) -> list[int]:
    try:
        pack_tokens(tokens)
    except (OverflowError, TypeError) as error:
        raise Refused(400, "prompt must be text, token ids, or a list of either", "prompt") from error
    return tokens


def _answer_length(prompt: list[int], given: int | None, fields: _Body, chat: bool, settings: SimSettings) -> int:
    room = settings.context_length - len(prompt)
    if room < 1:
        raise too_long(settings, len(prompt))
    if given is None:
        natural = max(64 + sum(prompt) % 192, fields.min_tokens or 0) if chat else COMPLETION_TOKENS
        return min(natural, room)
    if given < 1:
        raise Refused(400, f"max_tokens must be at least 1, got {given}.", "max_tokens", given)
    if given > room:
        raise too_long(settings, len(prompt), given)
    return given


def too_long(settings: SimSettings, prompt: int, wanted: int | None = None) -> Refused:
    """The engines' own words for a prompt, or a prompt and its answer, beyond the context."""
    limit = settings.context_length
    if settings.flavour == "sglang":
        if wanted is None:
            return Refused(
                400, f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens)."
            )
        text = (
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total"
        )
        return Refused(
            400, f"{text} of {prompt + wanted} tokens: {prompt} from the input and {wanted} for the completion."
        )
    text = f"This model's maximum context length is {limit} tokens. However, "
    if wanted is None:
        text += f"your prompt contains {prompt} input tokens, which exceeds this limit even without any output tokens."
    else:
        text += f"you requested {wanted} output tokens and your prompt contains {prompt} input tokens."
    text += f" Please reduce the length of the input prompt. (parameter=input_tokens, value={prompt})"
    return Refused(400, text, "input_tokens", prompt)
