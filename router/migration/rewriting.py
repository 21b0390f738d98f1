"""Rewrites the events of a worker that continues a stream as events of that stream: with its id and form, one usage for
all of it, and no second beginning."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engines.answers import whole
from engines.disaggregation.legs import count_of, raw, value_of
from router.migration.chunk import DATA, NULL, decode_choices, decode_fields, encode, is_data, write_event

Fields = dict[str, msgspec.Raw]
NAMES = ("id", "object", "created", "model")
"""Fields that are the same in all events of a stream."""
_ZERO = msgspec.Raw(b"0")
_ROLE = re.compile(rb'"role":')


class Rewriting:
    """`names`: the stream's fields of these names; empty where nothing was sent yet. `prompt_tokens`: of the client's
    prompt. `before`: tokens that the client has from earlier workers."""

    def __init__(self, names: Fields, chat: bool, prompt_tokens: int, before: int) -> None:
        self._names = names
        self._chat = chat
        self._prompt_tokens = prompt_tokens
        self._before = before

    def event(self, event: bytes) -> bytes:
        """The event for the client; empty for one that says what the client has been told already."""
        if not self._names or not is_data(event):
            return event
        fields = decode_fields(event[len(DATA) :])
        if "choices" not in fields:  # an error
            return event
        if self._chat and _ROLE.search(fields["choices"]):
            return b""
        fields |= self._names | {"choices": self._choices(fields["choices"])}
        if self._before and fields.get("usage", NULL) != NULL:  # else it answers the whole request
            fields["usage"] = msgspec.Raw(encode(self.usage(decode_fields(fields["usage"]))))
        return write_event(fields)

    def _choices(self, choices: msgspec.Raw) -> msgspec.Raw:
        return msgspec.Raw(encode([self._choice(choice) for choice in decode_choices(choices)]))

    def _choice(self, choice: Fields) -> Fields:
        if not self._chat or "text" not in choice:
            return choice | {"prompt_token_ids": NULL} if "prompt_token_ids" in choice else choice
        made = {"index": choice.get("index", _ZERO), "delta": msgspec.Raw(b'{"content":%b}' % choice["text"])}
        made |= {name: choice.get(name, NULL) for name in ("logprobs", "finish_reason")}
        if made["finish_reason"] != NULL:
            made["stop_reason"] = choice.get("stop_reason", NULL)
        return made | {"token_ids": choice.get("token_ids", NULL)}

    def usage(self, told: Fields) -> dict[str, Any]:
        """The usage of the whole stream, by what the last worker told of its part. The cached tokens are those that it
        found there, as far as they belong to the client's prompt."""
        completion = self._before + (count_of(told, "completion_tokens") or 0)
        details = value_of(told, "prompt_tokens_details")
        cached = whole(details.get("cached_tokens")) if isinstance(details, dict) else None
        if cached:
            told = told | {"prompt_tokens_details": raw({**details, "cached_tokens": min(cached, self._prompt_tokens)})}
        return told | {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens + completion,
            "completion_tokens": completion,
        }
