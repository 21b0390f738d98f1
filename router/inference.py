"""The few fields of an inference request that routing reads; everything else stays bytes."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from router.openai_errors import BadRequest

Endpoint = Literal["completions", "chat"]

ENDPOINTS: dict[bytes, Endpoint] = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}

_NONE = msgspec.Raw(b"null")
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Body(msgspec.Struct):
    """Of a completion or chat request. What only the tokenizer reads stays raw until it does."""

    model: str | None = None
    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    cache_salt: str | None = None


class _ModelOnly(msgspec.Struct):
    model: str | None = None


class Inference(NamedTuple):
    endpoint: Endpoint
    model: str | None
    """As the request names it; None when it names none."""
    cache_salt: str | None
    raw: bytes

    def fields(self) -> dict[str, Any]:
        """The whole body, decoded: for the tokenizer.

        Raises BadRequest for what a look at a few fields passes over (text that is not UTF-8), and ValidationError for
        valid JSON with a number that no float can hold.
        """
        try:
            decoded: dict[str, Any] = msgspec.json.decode(self.raw)
        except msgspec.ValidationError:
            raise
        except _NO_JSON as error:
            raise _no_json(error) from None
        return decoded


_decode_body = msgspec.json.Decoder(Body).decode
_decode_model = msgspec.json.Decoder(_ModelOnly).decode


def parse_inference(endpoint: Endpoint, raw: bytes) -> Inference:
    """Raises BadRequest for what is no such request. Messages never quote the body."""
    try:
        body = _decode_body(raw)
    except msgspec.ValidationError as error:
        raise BadRequest(400, f"The request body has a wrong field: {error}.", param=_param(error)) from None
    except _NO_JSON as error:
        raise _no_json(error) from None
    name, given, kinds = (
        ("prompt", body.prompt, '"[') if endpoint == "completions" else ("messages", body.messages, "[")
    )
    first = bytes(given).lstrip()[:1].decode("latin-1")
    if first not in kinds:
        wanted = "a string or a list" if endpoint == "completions" else "a list of messages"
        problem = "is missing" if first == "n" else "has the wrong type"
        raise BadRequest(400, f"The field {name!r} {problem}: it must be {wanted}.", param=name)
    return Inference(endpoint, body.model, body.cache_salt, raw)


def model_of(raw: bytes) -> str | None:
    """The model that any other request names in its JSON body, if it is one."""
    try:
        return _decode_model(raw).model
    except _NO_JSON:
        return None


def _no_json(error: Exception) -> BadRequest:
    return BadRequest(400, f"The request body is not valid JSON: {str(error).rstrip('.')}.", code="invalid_json")


def _param(error: msgspec.ValidationError) -> str | None:
    """The field that msgspec's message names: "… - at `$.model`"."""
    _, found, path = str(error).rpartition("`$.")
    return path.rstrip("`") if found else None
