"""The token ids of a request's prompt, made here as the engine would make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

from engines.description import EngineKind
from indexer.hashing import Tokens, pack_tokens
from router.tokens.conversation import CUT, conversation, cut_at_media, tool_definitions
from router.tokens.errors import CannotTokenize, Reason
from router.tokens.tokenizer import Tokenizer

Endpoint = Literal["completions", "chat"]
Fields = Mapping[str, Any]
"""A request's body, decoded from JSON; token ids may be an array."""

_NOT_FOLLOWED: Final[Mapping[str, Reason]] = {
    "prompt_embeds": "unsupported",
    "media_io_kwargs": "unsupported",
    "mm_processor_kwargs": "unsupported",
    "truncate_prompt_tokens": "untold",
    "lora_path": "untold",
    "extra_key": "untold",
    "session_params": "untold",
    "kv_transfer_params": "untold",
    "media": "multimodal",
}
"""What changes the prompt's tokens in ways that are not followed here. An engine that is asked for its tokens does not
tell of all: it cuts them off, caches them apart, puts them behind a session's, or takes a client's own instead, when it
computes them."""
_SGLANG_DIFFERS = (
    "tools",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "task",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
_SGLANG_SHOWS_OTHERWISE = ("tool_calls", "reasoning", "reasoning_content", "task", "tools", "phase", "prefix")
"""Fields of messages."""
_UNSET = (None, "auto")
"""Values of variables that vLLM 0.32 takes for none given (`merge_kwargs` in renderers/params.py)."""
_NOT_VARIABLES = frozenset({"chat_template", "tokenize", "messages", "tools", "continue_final_message"})


class PromptTokens:
    """Tokens of requests for one model. `tokenizer` None: only prompts that are token ids already."""

    def __init__(self, tokenizer: Tokenizer | None, engine: EngineKind = "vllm") -> None:
        self._tokenizer = tokenizer
        self._engine = engine

    def ids(self, endpoint: Endpoint, fields: Fields) -> list[int]:
        """Of the first prompt, when there is a batch. Raises CannotTokenize."""
        ids: list[int] = self.tokens(endpoint, fields).tolist()
        return ids

    def tokens(self, endpoint: Endpoint, fields: Fields, size: int = 0) -> Tokens:
        """`ids` as an array. `size`: of the request, in bytes. Also raises OverflowError or TypeError for ids in the
        request that are none."""
        for field, reason in _NOT_FOLLOWED.items():
            if fields.get(field) is not None:
                raise CannotTokenize(reason, f"the field {field}")
        return self._chat(fields, size) if endpoint == "chat" else self._completion(fields)

    def before_media(self, fields: Fields, size: int = 0) -> Tokens:
        """Of a chat, up to the text of the first message with media: engines put other tokens in these places, and
        make the same of what is in front. Raises CannotTokenize."""
        tokenizer = self._needed()
        text = self._render(tokenizer, {**fields, "messages": cut_at_media(fields.get("messages"))}, size)
        before, found, _ = text.partition(CUT)
        return tokenizer.encode(before if found else "", _flag(fields, "add_special_tokens", default=False))

    def _completion(self, fields: Fields) -> Tokens:
        if fields.get("suffix") is not None:  # the model's own form puts the text before a gap and that behind together
            raise CannotTokenize("untold", "the field suffix")
        prompt = first_prompt(fields.get("prompt"))
        if not isinstance(prompt, str):
            return pack_tokens(prompt)
        # SGLang does not know the field for completions.
        special = self._engine == "sglang" or _flag(fields, "add_special_tokens", default=True)
        return self._needed().encode(prompt, special)

    def _chat(self, fields: Fields, size: int) -> Tokens:
        ids = given_ids(fields) if self._engine == "sglang" else None
        if ids is not None:
            return pack_tokens(ids)
        tokenizer = self._needed()
        text = self._render(tokenizer, fields, size)
        return tokenizer.encode(text, _flag(fields, "add_special_tokens", default=False))

    def _render(self, tokenizer: Tokenizer, fields: Fields, size: int) -> str:
        if tokenizer.templates is None:
            raise CannotTokenize("no_template", "the engine renders this model's chats without a template")
        if fields.get("chat_template") is not None:
            # Engines refuse these by default, and rendering one can take as long as its author likes.
            raise CannotTokenize("unsupported", "a chat template in the request")
        if self._engine == "sglang":
            _reject_what_sglang_does_otherwise(fields)
        variables = template_variables(fields)
        if any(value in _UNSET for value in variables.values()):
            raise CannotTokenize("unsupported", "a variable of null or auto, which some engines leave out")
        template = tokenizer.templates.choose(with_tools=fields.get("tools") is not None)
        add, continued = _ending(fields)
        # SGLang leaves text as text even where the template takes parts.
        parts = template.wants_parts and self._engine != "sglang"
        return template.render(
            conversation(fields.get("messages"), as_parts=parts),
            tools=tool_definitions(fields.get("tools")),
            add_generation_prompt=add,
            continue_final_message=continued,
            variables=variables,
            size=size,
        )

    def _needed(self) -> Tokenizer:
        if self._tokenizer is None:
            raise CannotTokenize("no_tokenizer", "there is no tokenizer for this model")
        return self._tokenizer


def first_prompt(prompt: object) -> str | list[int] | Tokens:
    """Of text, token ids, or a list of either. Ids are not looked at one by one. Raises CannotTokenize."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list | np.ndarray):
        prompt = prompt[0]
    if isinstance(prompt, str | np.ndarray):
        return prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    raise CannotTokenize("malformed", "the prompt is neither text nor a list of token ids")


def given_ids(fields: Fields) -> list[int] | Tokens | None:
    """What SGLang takes in place of a chat's messages, if it is given. Raises CannotTokenize."""
    ids = fields.get("input_ids")
    given = None if ids is None else first_prompt(ids)
    if isinstance(given, str):
        raise CannotTokenize("malformed", "input_ids is not a list of token ids")
    return given


def template_variables(fields: Fields) -> dict[str, Any]:
    """What the request adds to the template's variables, in vLLM's order of precedence; raises CannotTokenize."""
    given = fields.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise CannotTokenize("malformed", "chat_template_kwargs is not an object")
    if not _NOT_VARIABLES.isdisjoint(given):
        raise CannotTokenize("unsupported", "chat_template_kwargs that replace what the request says elsewhere")
    variables = dict(given)
    if fields.get("documents") is not None:
        variables["documents"] = fields["documents"]
    effort = fields.get("reasoning_effort")
    if effort is not None:
        variables |= {"reasoning_effort": effort, "enable_thinking": given.get("enable_thinking", effort != "none")}
    return variables


def _ending(fields: Fields) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message)."""
    continued = _flag(fields, "continue_final_message", default=False)
    add = _flag(fields, "add_generation_prompt", default=True)
    if continued and add:
        raise CannotTokenize("malformed", "continue_final_message together with add_generation_prompt")
    return add, continued


def _flag(fields: Fields, name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise CannotTokenize("malformed", f"{name} is not true or false")
    return value


def _sglang_shows_otherwise(message: Mapping[str, Any]) -> bool:
    """It shows an empty list of calls and the id of a call on any message, and its reasoning under one name; no user's
    name, no id of null, and all roles in small letters."""
    role = message.get("role")
    return (
        isinstance(message.get("content"), list)
        or any(message.get(name) is not None for name in _SGLANG_SHOWS_OTHERWISE)
        or (role == "user" and message.get("name") is not None)
        or (role == "tool") == (message.get("tool_call_id") is None)
        or (isinstance(role, str) and role != role.lower())
    )


def _reject_what_sglang_does_otherwise(fields: Fields) -> None:
    """Where it, or one of its versions, differs from vLLM its own answer is asked for rather than imitated."""
    for name in _SGLANG_DIFFERS:
        if fields.get(name) is not None:
            raise CannotTokenize("unsupported", f"{name}, which SGLang treats in its own way")
    messages = fields.get("messages")
    dicts = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    if any(map(_sglang_shows_otherwise, dicts)):
        raise CannotTokenize("unsupported", "parts, calls, reasoning or a name, which SGLang shows in its own way")
    if dicts and dicts[-1].get("role") == "assistant":
        raise CannotTokenize("unsupported", "a last message by the assistant, which SGLang turns into the user's")
