"""Which requests cannot be continued by another worker, and why."""

from __future__ import annotations

from typing import Any

import msgspec

from engines.answers import UNDECODABLE
from engines.disaggregation.legs import Body, answers_wanted, prompts_in, value_of
from router.tokens import Endpoint

CARRIED = frozenset(
    (
        *("model", "stream", "stream_options", "stream_interval", "priority", "cache_salt", "session_id", "user"),
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logit_bias", "allowed_token_ids"),
        *("stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
    )
)
"""Fields that mean the same for the rest of an answer as for all of it, or make no difference to it: they go to the
next worker as they came."""
_DECIDES_THE_PROMPT = frozenset(
    (
        *("prompt", "messages", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort"),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message", "return_prompt_text"),
        *("truncate_prompt_tokens", "truncation_side"),
    )
)
"""Fields that decide the prompt's tokens. They are left out: the next worker is sent the tokens themselves."""
_COUNTS = ("max_tokens", "max_completion_tokens", "min_tokens")
_SEEN_TO = frozenset((*_COUNTS, "n", "best_of", "return_token_ids", "response_format"))
"""Fields that `bodies` rewrites, or that are judged here by their values."""
_MEANS_NOTHING = frozenset(
    (
        *("length_penalty", "tool_choice", "parallel_tool_calls", "top_logprobs", "return_tokens_as_token_ids"),
        *("include_reasoning", "request_id", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key"),
    )
)
"""Fields that make no difference to an answer without beams, tools and logprobs."""
_KNOWN = CARRIED | _DECIDES_THE_PROMPT | _SEEN_TO | _MEANS_NOTHING
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values with which a field might as well not be there."""


class _Part(msgspec.Struct, gc=False):
    type: str = ""


class _Message(msgspec.Struct, gc=False):
    content: str | list[str | _Part] | None = None


_messages = msgspec.json.Decoder(list[_Message])


def refusal(endpoint: Endpoint, body: Body) -> str | None:
    """Why a streamed request cannot be continued, completing "The stream cannot go on elsewhere: …"; None if it can.

    A field that is not known to be harmless counts as harmful: a wrong continuation is worse than an error.
    """
    if answers_wanted(body) > 1:
        return "it has several answers"
    if prompts_in(body) > 1:
        return "it has several prompts"
    if not all(isinstance(value_of(body, name), int | None) for name in _COUNTS):
        return "its limits are no whole numbers"
    unknown = _unknown(body, endpoint)
    if unknown:
        return f"the request has {unknown!r}"
    if endpoint == "chat" and not _only_text(body):
        return "its messages hold more than text"
    return None


def _unknown(body: Body, endpoint: Endpoint) -> str | None:
    """The name of a field with which the rest of the answer might come out differently on another worker."""
    if endpoint == "completions" and value_of(body, "logprobs") is not None:
        return "logprobs"  # 0 asks for the one of each token, and for no others beside it
    if not _is_text(value_of(body, "response_format")):
        return "response_format"
    return next((name for name in body.keys() - _KNOWN if value_of(body, name) not in _NEUTRAL), None)


def _is_text(response_format: Any) -> bool:
    return response_format is None or response_format == {"type": "text"}


def _only_text(body: Body) -> bool:
    try:
        messages = _messages.decode(body.get("messages", b"[]"))
    except UNDECODABLE:
        return False
    parts = (part for message in messages if isinstance(message.content, list) for part in message.content)
    return all(isinstance(part, str) or part.type == "text" for part in parts)
