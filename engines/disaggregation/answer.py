"""What a prefill leg's answer tells: where its KV is, and what it found cached."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from engines.answers import UNDECODABLE, decoded, whole
from engines.disaggregation.nixl_push import COORDINATES


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _MetaInfo(_Details):
    """Of SGLang's /generate."""

    finish_reason: Any = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    meta_info: _MetaInfo | None = None


class Prefilled(NamedTuple):
    """None for what the engine does not tell."""

    params: msgspec.Raw | None = None
    """`kv_transfer_params` as they came."""
    cached_tokens: int | None = None
    aborted: bool = False
    """The engine gave it up, as vLLM does when it is told to stop: there is no KV to hand over."""
    prompt_tokens: int | None = None
    """Of its usage."""


_decode = msgspec.json.Decoder(_Answer | list[_Answer]).decode
_decode_any = msgspec.json.Decoder().decode


def read_answer(body: bytes) -> Prefilled:
    """Raises ValueError for what is no answer of an OpenAI route, nor of SGLang's /generate."""
    answer = decoded(_decode, body)
    if isinstance(answer, list):  # to several prompts, each with its own
        if not answer:
            raise ValueError("empty")
        return Prefilled()
    params = answer.kv_transfer_params if bytes(answer.kv_transfer_params).startswith(b"{") else None
    usage = answer.usage
    details = usage.prompt_tokens_details if usage else answer.meta_info
    cached, prompt = whole(details.cached_tokens) if details else None, usage.prompt_tokens if usage else None
    return Prefilled(params, cached, _is_aborted(answer), prompt)


def _is_aborted(answer: _Answer) -> bool:
    of_generate = answer.meta_info.finish_reason if answer.meta_info else None
    reasons = [choice.finish_reason for choice in answer.choices or ()]
    return "abort" in reasons or (isinstance(of_generate, dict) and of_generate.get("type") == "abort")


def coordinates(params: msgspec.Raw) -> dict[str, Any] | None:
    """Where decode workers register for a push; None where the worker does not push, or says what nobody can read."""
    try:
        found = _decode_any(params)
    except UNDECODABLE:
        return None
    if found.get("transfer_mode") != "push":
        return None
    return {name: found[name] for name in COORDINATES if found.get(name) is not None}
