"""A prompt's token ids in place of its text, or beside it: the engine need not make them once more.

vLLM takes ids as a completion's prompt. Of a chat it takes them in `kv_transfer_params` (renderers/online_renderer.py,
0.32): the template and the tokenizer are passed over, while tools and reasoning are parsed out of the answer as ever.
Versions before pass over the field instead, hence the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engines.disaggregation.legs import TRANSFER, raw, read_body, value_of, write_body
from indexer.hashing import Tokens

QUESTION_PATH = "/v1/chat/completions"
_IDS = "prompt_token_ids"
_NEEDS_TEXT = ("echo", "return_prompt_text")
"""Fields that have the engine tell the prompt as it was written."""
_GIVEN_WITH_TEXT = (TRANSFER, "suffix")
"""Fields of a prompt that stays as it is: a client says something of tokens itself, or the engine makes one prompt of
the text before a gap and that behind it (0.32 refuses ids then)."""


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


_answer = msgspec.json.Decoder(_Answer)


def with_ids(endpoint: Literal["completions", "chat"], given: bytes, ids: Tokens) -> bytes | None:
    """The body `given` of a request with one prompt, with its tokens; None where they cannot stand for it."""
    try:
        body = read_body(given)
    except ValueError:  # a field's name is no text
        return None
    if not len(ids) or any(value_of(body, name) for name in _NEEDS_TEXT):
        return None
    if any(value_of(body, name) is not None for name in _GIVEN_WITH_TEXT):
        return None
    told = raw(ids.tolist())
    return write_body({**body, **({"prompt": told} if endpoint == "completions" else {TRANSFER: raw({_IDS: told})})})


def question(model: str, ids: Sequence[int]) -> bytes:
    """A chat whose answer shows whether `ids` or its messages were its prompt: it is of more tokens than one."""
    chat: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "How are you?"}], "max_tokens": 1}
    return msgspec.json.encode({**chat, TRANSFER: {_IDS: list(ids[:1])}})


def took_ids(status: int, answer: bytes) -> bool:
    """Whether it was answered to its ids."""
    try:
        return status == 200 and _answer.decode(answer).usage.prompt_tokens == 1
    except (ValueError, RecursionError):
        return False
