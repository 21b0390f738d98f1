"""Engines' own generate requests, and other paths of theirs that are not below /v1.

A generate request's text or token ids are a prompt like any other, so it is read as a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from engines.answers import UNDECODABLE
from engines.disaggregation.sglang import is_in_prompt
from engines.shaping import with_rank
from router.openai.bodies import AsCompletion, Sampling, SglangGenerate, VllmGenerate, VllmSteering
from router.openai.inference import Inference, check_prompt, decoded_as, first_salt, is_asked, is_given, read_as

PASSED_ON = frozenset(
    (b"/tokenize", b"/detokenize", b"/pooling", b"/classify", b"/score", b"/rerank", b"/v2/rerank", b"/v2/embed")
)
"""For clients as those below /v1 are; whatever else an engine has is for its operator."""

_IDS = (b"[", "a list of token ids")
_EMPTY = (b"[]", b"{}")
_decode_any = msgspec.json.Decoder().decode
_decode_sglang = msgspec.json.Decoder(SglangGenerate).decode
_decode_vllm = msgspec.json.Decoder(VllmGenerate).decode
_decode_loose_vllm = msgspec.json.Decoder(VllmGenerate, strict=False).decode
_decode_vllm_steering = msgspec.json.Decoder(VllmSteering).decode


def _decode_any_vllm(raw: bytes) -> VllmGenerate:
    return decoded_as(_decode_vllm, _decode_loose_vllm, raw, _decode_vllm_steering)


def _of_sglang(raw: bytes) -> Inference:
    given = read_as(_decode_sglang, raw)
    name = "text"
    n = _choices(given.sampling_params)
    body = AsCompletion(n=n, lora_path=given.lora_path, extra_key=given.extra_key, session_params=given.session_params)
    if is_given(given.input_ids):  # the order in which the engine takes them: embeddings beside others are dropped
        name, body.prompt = "input_ids", given.input_ids
        check_prompt(name, body.prompt, *_IDS)
    elif is_given(given.input_embeds) and not is_given(given.text):
        body.prompt_embeds = given.input_embeds
    else:
        body.prompt = given.text
        check_prompt(name, body.prompt)
    salt = first_salt(given.cache_salt)
    _add_media(body, given.image_data, given.video_data, given.audio_data)
    said = given.model or None, salt, bool(given.stream), raw, body, name
    begin = _shown_from(given)
    first = next(iter(begin), None) if isinstance(begin, list) else begin
    return Inference("completions", *said, "sglang", is_in_prompt(begin), first == 0)


def _of_vllm(raw: bytes) -> Inference:
    given = read_as(_decode_any_vllm, raw)
    check_prompt("token_ids", given.token_ids, *_IDS)
    body = AsCompletion(prompt=given.token_ids, n=_choices(given.sampling_params))
    _add_media(body, given.features, given.content_parts)
    said = given.model or None, given.cache_salt, bool(given.stream), raw, body, "token_ids"
    uncached = _passes_over_cache(given.sampling_params or Sampling())
    return Inference("completions", *said, "vllm", uncached, uncached)


def _choices(sampled: Sampling | list[Sampling] | None) -> int | None:
    """Answers to each prompt: of a batch that gives each its own number, the first's."""
    first = next(iter(sampled), None) if isinstance(sampled, list) else sampled
    return int(first.n) if first and first.n else None


def _shown_from(given: SglangGenerate) -> object:
    """Where the prompt's log probabilities begin, or a list of that: from there on the engine computes again. None: it
    asks for none."""
    try:
        return _decode_any(given.logprob_start_len) if is_asked(given.return_logprob) else None
    except UNDECODABLE:
        return None


def _passes_over_cache(sampled: Sampling) -> bool:
    """As SamplingParams.__post_init__ has it."""
    asked = sampled.prompt_logprobs, sampled.prompt_logprob_token_ids
    return any(map(is_given, asked)) or is_asked(sampled.skip_reading_prefix_cache)


def _add_media(body: AsCompletion, *fields: msgspec.Raw) -> None:
    given = [field for field in fields if is_given(field) and memoryview(field) not in _EMPTY]
    if given:
        body.media = msgspec.Raw(msgspec.json.encode({"type": "image", "data": given}))


GENERATE: Mapping[bytes, Callable[[bytes], Inference]] = {b"/generate": _of_sglang, b"/inference/v1/generate": _of_vllm}
"""By path, how a body is read. Each raises BadRequest as `parse_inference` does."""
MODEL_UNREAD = frozenset((b"/classify",))
"""Of `PASSED_ON`, where SGLang passes over the model (EmbeddingReqInput has none)."""
RANKS_IN_BODY: Mapping[bytes, Callable[[bytes, int], bytes]] = {b"/generate": with_rank}
"""Where no header picks the data-parallel rank."""
