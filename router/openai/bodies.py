"""The fields of request bodies that the router reads, and those that no request may have."""

from __future__ import annotations

from typing import Annotated

import msgspec

ABSENT = msgspec.Raw()

MOST_CHOICES = 128
"""Answers to a prompt (`n`, `best_of`): OpenAI's limit. Engines take memory for each."""
Salt = str | list[str | None] | None
"""To SGLang, each prompt of a batch may have its own."""
_Choices = Annotated[int, msgspec.Meta(le=MOST_CHOICES)] | None


class Transfer(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """What of `kv_transfer_params` is a client's to say; the rest tells an engine whom to fetch KV from."""

    prompt_token_ids: msgspec.Raw = ABSENT


class Extra(msgspec.Struct, gc=False):
    """What of vLLM's `vllm_xargs` is not a client's to say. Since 0.28 one has the engine tell again of blocks that it
    told of before, which cannot be told from second copies (v1/core/kv_cache_manager.py): they would never be gone.
    The others stand beside it in `SamplingParams.extra_args`, and connectors take them for what they are at the top of
    a body, where a text is no such thing: an engine with NixlConnector dies of one in its scheduler (0.9 to 0.30)."""

    kv_cache_report_mode: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class Steering(msgspec.Struct, gc=False):
    """What no request may say: checked as it is decoded, which costs nothing.

    SGLang's fields name a host to connect to, and a rank of the engine that the router would not know of. Those from
    `lora_id` on are what its servers, and gateways, tell each other on its own paths (srt/managers/io_struct.py,
    0.5.23). The last five let a client put KV of its own under the key of another one's image, and give the scheduler
    tensors as JSON, or places in the prompt that are none, of which it dies.
    """

    kv_transfer_params: Transfer | None = None
    ec_transfer_params: None = None
    vllm_xargs: Extra | None = None
    bootstrap_host: None = None
    bootstrap_port: None = None
    bootstrap_room: None = None
    data_parallel_rank: None = None
    routed_dp_rank: None = None
    disagg_prefill_dp_rank: None = None
    lora_id: None = None
    bootstrap_pair_key: None = None
    decode_tp_size: None = None
    http_worker_ipc: None = None
    encoder_urls: None = None
    need_wait_for_mm_inputs: None = None
    num_items_assigned: None = None
    kv_hints: None = None
    mm_hashes: None = None
    mm_content_hashes: None = None
    positional_embed_overrides: None = None
    token_indices_to_pool: None = None
    multi_item_delimiter_indices: None = None


STEERING = frozenset(Steering.__struct_fields__)


class Bounded(Steering, gc=False):
    model: str | None = None
    n: _Choices = None
    best_of: _Choices = None


class Body(Bounded, gc=False):
    """Of any request. What only the tokenizer reads stays raw until it does."""

    cache_salt: Salt = None
    stream: bool | None = None
    prompt_logprobs: msgspec.Raw = ABSENT
    echo: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT
    add_special_tokens: msgspec.Raw = ABSENT
    truncate_prompt_tokens: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT
    media_io_kwargs: msgspec.Raw = ABSENT
    mm_processor_kwargs: msgspec.Raw = ABSENT
    lora_path: msgspec.Raw = ABSENT
    extra_key: msgspec.Raw = ABSENT
    session_params: msgspec.Raw = ABSENT


LOOSE = frozenset({"n", "best_of", "stream"})
"""What engines take in other forms too, as 1.0 or "1": some clients' JSON writes every number as a float."""


class Adapter(msgspec.Struct, gc=False):
    """SGLang's other way to name one than as the model."""

    lora_path: msgspec.Raw = ABSENT


class PassedOn(Bounded, gc=False):
    """Of a request that the router passes on: all at once, since looking through a long body takes longest."""

    stream: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    store: msgspec.Raw = ABSENT


class Inputs(msgspec.Struct, gc=False):
    """Of requests for embeddings and the like: what may be token ids."""

    input: msgspec.Raw = ABSENT
    input_ids: msgspec.Raw = ABSENT
    query: msgspec.Raw = ABSENT
    items: msgspec.Raw = ABSENT


class Completion(Body, gc=False):
    prompt: msgspec.Raw = ABSENT
    suffix: msgspec.Raw = ABSENT


class Chat(Body, gc=False):
    messages: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    reasoning_effort: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    task: msgspec.Raw = ABSENT
    add_generation_prompt: msgspec.Raw = ABSENT
    continue_final_message: msgspec.Raw = ABSENT
    input_ids: msgspec.Raw = ABSENT


class Sampling(msgspec.Struct, gc=False):
    """Of engines' own generate requests."""

    n: Annotated[float, msgspec.Meta(le=MOST_CHOICES)] | None = None
    beam_width: Annotated[float, msgspec.Meta(le=MOST_CHOICES)] | None = None
    extra_args: Extra | None = None
    prompt_logprobs: msgspec.Raw = ABSENT
    prompt_logprob_token_ids: msgspec.Raw = ABSENT
    skip_reading_prefix_cache: msgspec.Raw = ABSENT


class Sampled(msgspec.Struct, gc=False):
    extra_args: Extra | None = None


class VllmSteering(Steering, gc=False):
    """What no /inference/v1/generate may say."""

    sampling_params: Sampled | None = None


class SglangGenerate(Steering, gc=False):
    """Of SGLang's /generate (srt/managers/io_struct.py, 0.5.23). Each prompt of a batch may have its own of all."""

    model: str | None = None
    """The engine passes over it, the router does not."""
    text: msgspec.Raw = ABSENT
    input_ids: msgspec.Raw = ABSENT
    input_embeds: msgspec.Raw = ABSENT
    image_data: msgspec.Raw = ABSENT
    video_data: msgspec.Raw = ABSENT
    audio_data: msgspec.Raw = ABSENT
    sampling_params: Sampling | list[Sampling] | None = None
    stream: bool | None = None
    cache_salt: Salt = None
    lora_path: msgspec.Raw = ABSENT
    extra_key: msgspec.Raw = ABSENT
    session_params: msgspec.Raw = ABSENT
    return_logprob: msgspec.Raw = ABSENT
    logprob_start_len: msgspec.Raw = ABSENT


class VllmGenerate(Steering, gc=False):
    """Of vLLM's /inference/v1/generate (entrypoints/scale_out/token_in_token_out/protocol.py, 0.32)."""

    model: str | None = None
    token_ids: msgspec.Raw = ABSENT
    features: msgspec.Raw = ABSENT
    content_parts: msgspec.Raw = ABSENT
    sampling_params: Sampling | None = None
    stream: bool | None = None
    cache_salt: str | None = None


class AsCompletion(Completion, gc=False):
    """An engine's own generate request, read as a completion."""

    media: msgspec.Raw = ABSENT
    """What the model sees besides text."""
