"""The stated fallback: an engine's own /tokenize, asked through whatever can POST to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from engines.description import EngineKind
from engines.shaping import is_other_chat, parse_tokenize, tokenize_body, tokenize_path
from router.tokens.conversation import has_media
from router.tokens.errors import CannotTokenize
from router.tokens.prompt import Endpoint, Fields, first_prompt, given_ids, template_variables

Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""(path, JSON body) to (status, body); status 0 when there was no answer."""

_UNKNOWN_TO_CHATS = ("add_generation_prompt", "add_special_tokens")
"""Fields that /v1/tokenize of SGLang follows (0.5.23) and its chats pass over: these begin an answer in any case."""


class EngineTokens:
    """Tokens of requests as one engine makes them."""

    def __init__(self, kind: EngineKind, post: Post, version: str | None = None) -> None:
        self._kind = kind
        self._post = post
        self._version = version

    async def ids(self, endpoint: Endpoint, fields: Fields) -> list[int]:
        """Of the first prompt, when there is a batch. Raises CannotTokenize when the engine answers otherwise."""
        question = self._chat(fields) if endpoint == "chat" else self._completion(fields)
        if isinstance(question, list):
            return question
        path = tokenize_path(self._kind)
        if path is None:
            raise CannotTokenize("engine", "an engine of unknown kind has no known way to tokenize")
        status, answer = await self._post(path, tokenize_body(question))
        if status != 200:
            raise CannotTokenize("engine", f"the engine answered {path} with {status or 'nothing'}")
        try:
            ids = parse_tokenize(answer)
        except (ValueError, msgspec.MsgspecError):
            raise CannotTokenize("engine", f"the engine's answer to {path} holds no token ids") from None
        if endpoint == "chat" and is_other_chat(self._kind, self._version, ids):
            raise CannotTokenize("no_template", f"the engine's {path} renders gpt-oss's chats otherwise than it does")
        return ids

    def _completion(self, fields: Fields) -> list[int] | dict[str, Any]:
        prompt = first_prompt(fields.get("prompt"))
        if isinstance(prompt, list):
            return prompt
        question = {key: fields[key] for key in ("model", "add_special_tokens") if key in fields}
        if self._kind == "sglang":  # its completions do not know the field
            question.pop("add_special_tokens", None)
        return question | {"prompt": prompt}

    def _chat(self, fields: Fields) -> list[int] | dict[str, Any]:
        ids = given_ids(fields) if self._kind == "sglang" else None
        if ids is not None:
            return list(ids)
        messages = fields.get("messages")
        if not isinstance(messages, list):
            raise CannotTokenize("malformed", "messages is not a list")
        if has_media(messages):
            raise CannotTokenize("multimodal", "a message with a part that is not text")
        if self._kind != "vllm":
            return {name: value for name, value in fields.items() if name not in _UNKNOWN_TO_CHATS}
        # Its chat route makes these of a request first; its /tokenize takes them as they are.
        messages = [_with_reasoning(message) for message in messages]
        return {**fields, "messages": messages, "chat_template_kwargs": template_variables(fields) or None}


def _with_reasoning(message: object) -> object:
    """The older name of the field, made the newer one."""
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    reasoning = message.get("reasoning")
    return {**message, "reasoning": message["reasoning_content"] if reasoning is None else reasoning}
