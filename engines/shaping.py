"""How engines want to be asked: for a chosen data-parallel rank, and for the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from engines.answers import decoded
from engines.description import EngineKind
from engines.disaggregation.legs import raw, read_body, write_body
from engines.versions import Version, is_before

_PROMPT_FIELDS = ("model", "prompt", "add_special_tokens")
_CHAT_FIELDS = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "task",
)
"""What decides a chat's tokens; either engine passes over what it does not know. The last two are SGLang's (0.5.23), of
MiniMax-M3 and DeepSeek-V4."""

_TOKENIZES_HARMONY: Version = (0, 33, 0)
_HARMONY_START = 200006
"""`<|start|>`, with which all chats of gpt-oss begin."""


class _Tokenized(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]]


_tokenized = msgspec.json.Decoder(_Tokenized)


def rank_headers(kind: EngineKind, dp_rank: int) -> list[tuple[bytes, bytes]]:
    """The header that picks a data-parallel rank on the OpenAI routes; both engines read the same one."""
    return [] if kind == "unknown" else [(b"X-data-parallel-rank", str(dp_rank).encode())]


def with_rank(body: bytes, dp_rank: int) -> bytes:
    """The body of SGLang's /generate for a data-parallel rank: it reads no header. The newer name counts where both are
    known."""
    try:
        return write_body({**read_body(body), "data_parallel_rank": raw(dp_rank), "routed_dp_rank": raw(dp_rank)})
    except ValueError:  # for the engine to judge
        return body


def tells_tokens(kind: EngineKind) -> bool:
    """Whether streams of chats and completions say their tokens, asked with `return_token_ids`. SGLang 0.5.23 refuses
    that with a chat."""
    return kind == "vllm"


def tokenize_path(kind: EngineKind) -> str | None:
    """Where a POST of `tokenize_body` answers the tokens."""
    return {"vllm": "/tokenize", "sglang": "/v1/tokenize"}.get(kind)


def tokenize_body(request: Mapping[str, Any]) -> bytes:
    """The body that asks for the tokens of an OpenAI request: a chat if it has `messages`, else its `prompt` text."""
    fields = _CHAT_FIELDS if "messages" in request else _PROMPT_FIELDS
    return msgspec.json.encode({field: request[field] for field in fields if request.get(field) is not None})


def parse_tokenize(body: bytes) -> list[int]:
    """The token ids in an answer to `tokenize_body`. Raises ValueError for any other answer."""
    return decoded(_tokenized.decode, body).tokens


def is_other_chat(kind: EngineKind, version: str | None, ids: Sequence[int]) -> bool:
    """Whether an engine tells these `ids` of a chat and makes others when it serves it.

    vLLM renders gpt-oss's chats by code (Harmony). Its /tokenize rendered them by the model's template, which differs
    (0.30; no more in 0.33: entrypoints/serve/tokenize/serving.py).
    """
    return kind == "vllm" and is_before(version, _TOKENIZES_HARMONY) and list(ids[:1]) == [_HARMONY_START]
