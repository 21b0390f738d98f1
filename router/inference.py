"""The few fields of an inference request that routing reads; everything else stays bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from router.openai_errors import BadRequest
from router.tokens import read_ids

Endpoint = Literal["completions", "chat"]

ENDPOINTS: dict[bytes, Endpoint] = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}

_ABSENT = msgspec.Raw()
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Body(msgspec.Struct, gc=False):
    """Of any request. What only the tokenizer reads stays raw until it does."""

    model: str | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    add_special_tokens: msgspec.Raw = _ABSENT
    truncate_prompt_tokens: msgspec.Raw = _ABSENT
    prompt_embeds: msgspec.Raw = _ABSENT
    media_io_kwargs: msgspec.Raw = _ABSENT
    mm_processor_kwargs: msgspec.Raw = _ABSENT


class _Completion(_Body, gc=False):
    prompt: msgspec.Raw = _ABSENT


class _Chat(_Body, gc=False):
    messages: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    reasoning_effort: msgspec.Raw = _ABSENT
    add_generation_prompt: msgspec.Raw = _ABSENT
    continue_final_message: msgspec.Raw = _ABSENT


class _ModelOnly(msgspec.Struct):
    model: str | None = None


class Inference(NamedTuple):
    endpoint: Endpoint
    model: str | None
    """As the request names it; None when it names none."""
    cache_salt: str | None
    streamed: bool
    raw: bytes
    body: _Completion | _Chat

    def fields(self) -> dict[str, Any]:
        """What `PromptTokens` reads, as far as it is given; a prompt of token ids may be an array.

        Raises BadRequest for text that is not UTF-8, anywhere in the body, and ValidationError for valid JSON with a
        number that no float can hold.
        """
        return _decoded(self._read_fields)

    def whole(self) -> dict[str, Any]:
        """All that the request says, for an engine. Raises as `fields` does."""
        return _decoded(lambda: _decode(self.raw))

    def _read_fields(self) -> dict[str, Any]:
        if not self.raw.isascii():
            self.raw.decode()  # what was passed over may be no text
        given = [(name, getattr(self.body, name)) for name in self.body.__struct_fields__[_PLAIN:]]
        return {name: _read(name, value) for name, value in given if value is not _ABSENT}


_PLAIN = 3
"""Fields of `_Body` that are decoded at once."""
_decode = msgspec.json.Decoder().decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_model = msgspec.json.Decoder(_ModelOnly).decode


def parse_inference(endpoint: Endpoint, raw: bytes) -> Inference:
    """Raises BadRequest for what is no such request. Messages never quote the body."""
    try:
        body = _decode_completion(raw) if endpoint == "completions" else _decode_chat(raw)
    except msgspec.ValidationError as error:
        raise BadRequest(400, f"The request body has a wrong field: {error}.", param=_param(error)) from None
    except _NO_JSON as error:
        raise _no_json(error) from None
    if isinstance(body, _Completion):
        _check("prompt", body.prompt, b'"[', "a string or a list")
    else:
        _check("messages", body.messages, b"[", "a list of messages")
    return Inference(endpoint, body.model, body.cache_salt, bool(body.stream), raw, body)


def model_of(raw: bytes) -> str | None:
    """The model that any other request names in its JSON body, if it is one."""
    try:
        return _decode_model(raw).model
    except _NO_JSON:
        return None


def _check(name: str, given: msgspec.Raw, kinds: bytes, wanted: str) -> None:
    """`kinds`: first bytes that the value may have. The value may be long and is not copied."""
    first = bytes(memoryview(given)[:1])
    if first in (b"", b"n"):
        raise BadRequest(400, f"The field {name!r} is missing: it must be {wanted}.", param=name)
    if first not in kinds:
        raise BadRequest(400, f"The field {name!r} has the wrong type: it must be {wanted}.", param=name)


def _read(name: str, raw: msgspec.Raw) -> Any:
    ids = read_ids(raw) if name == "prompt" else None
    return _decode(raw) if ids is None else ids


def _decoded(decode: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return decode()
    except msgspec.ValidationError:
        raise
    except _NO_JSON as error:
        raise _no_json(error) from None


def _no_json(error: Exception) -> BadRequest:
    return BadRequest(400, f"The request body is not valid JSON: {str(error).rstrip('.')}.", code="invalid_json")


def _param(error: msgspec.ValidationError) -> str | None:
    """The field that msgspec's message names: "… - at `$.model`"."""
    _, found, path = str(error).rpartition("`$.")
    return path.rstrip("`") if found else None
