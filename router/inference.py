"""The few fields of an inference request that routing reads; everything else stays bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from router.openai_errors import BadRequest
from router.tokens import read_ids

Endpoint = Literal["completions", "chat"]

ENDPOINTS: dict[bytes, Endpoint] = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}

_ABSENT = msgspec.Raw()
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


MOST_PROMPTS = 2048
"""In one request: as many inputs as OpenAI takes."""
MOST_CHOICES = 128
"""Answers to a prompt (`n`, `best_of`): OpenAI's limit. Engines take memory for each."""
_Choices = Annotated[int, msgspec.Meta(le=MOST_CHOICES)] | None


class _Transfer(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """What of `kv_transfer_params` is a client's to say; the rest tells an engine whom to fetch KV from."""

    prompt_token_ids: msgspec.Raw = _ABSENT


class _Bounded(msgspec.Struct, gc=False):
    """What no request may say, or not without limit: checked as it is decoded, which costs nothing.

    SGLang's fields name a host to connect to, and a rank of the engine that the router would not know of.
    """

    model: str | None = None
    n: _Choices = None
    best_of: _Choices = None
    kv_transfer_params: _Transfer | None = None
    bootstrap_host: None = None
    bootstrap_port: None = None
    bootstrap_room: None = None
    data_parallel_rank: None = None
    routed_dp_rank: None = None
    disagg_prefill_dp_rank: None = None


_STEERING = frozenset(_Bounded.__struct_fields__) - {"model", "n", "best_of"}


class _Body(_Bounded, gc=False):
    """Of any request. What only the tokenizer reads stays raw until it does."""

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


_PLAIN = _Body.__struct_fields__.index("add_special_tokens")
"""Fields of `_Body` that are decoded at once."""
_LIST, _NULL = b"[n"
_BATCH = re.compile(rb"\[\s*[\"\[]")
_decode = msgspec.json.Decoder().decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_bounded = msgspec.json.Decoder(_Bounded).decode
_decode_batch = msgspec.json.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_PROMPTS)]).decode


def parse_inference(endpoint: Endpoint, raw: bytes) -> Inference:
    """Raises BadRequest for what is no such request. Messages never quote the body."""
    try:
        body = _decode_completion(raw) if endpoint == "completions" else _decode_chat(raw)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from None
    except _NO_JSON as error:
        raise _no_json(error) from None
    if isinstance(body, _Completion):
        if _check("prompt", body.prompt, b'"[', "a string or a list") == _LIST:
            _check_batch(body.prompt)
    else:
        _check("messages", body.messages, b"[", "a list of messages")
    return Inference(endpoint, body.model, body.cache_salt, bool(body.stream), raw, body)


def model_of(raw: bytes, may_be_other: bool) -> str | None:
    """The model that any other request names in its JSON body. `may_be_other`: it need not be JSON, and is then passed
    over. Raises BadRequest for what is no JSON, and for what no request may say."""
    try:
        return _decode_bounded(raw).model
    except msgspec.ValidationError as error:
        if _param(error) is None:  # no object: nothing is said in it
            return None
        raise _wrong_field(error) from None
    except _NO_JSON as error:
        if may_be_other:
            return None
        # Engines' parsers take more for JSON than RFC 8259 does, such as NaN or UTF-16, and would read on.
        raise _no_json(error) from None


def _wrong_field(error: msgspec.ValidationError) -> BadRequest:
    param = _param(error)
    if param in _STEERING:
        return BadRequest(400, f"The field {param!r} steers engines, and is not for clients to give.", param=param)
    return BadRequest(400, f"The request body has a wrong field: {error}.", param=param)


def _check(name: str, given: msgspec.Raw, kinds: bytes, wanted: str) -> int:
    """`kinds`: first bytes that the value may have; returns the one that it has. The value may be long and is not
    copied."""
    value = memoryview(given)
    first = value[0] if value.nbytes else _NULL
    if first == _NULL:
        raise BadRequest(400, f"The field {name!r} is missing: it must be {wanted}.", param=name)
    if first not in kinds:
        raise BadRequest(400, f"The field {name!r} has the wrong type: it must be {wanted}.", param=name)
    return first


def _check_batch(prompt: msgspec.Raw) -> None:
    """One of token ids is no batch, and not looked through."""
    if _BATCH.match(memoryview(prompt)):
        try:
            _decode_batch(prompt)
        except msgspec.ValidationError:
            raise BadRequest(400, f"One request may hold {MOST_PROMPTS} prompts.", param="prompt") from None


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
