"""The few fields of an inference request that routing reads; everything else stays bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec

from engines.answers import UNDECODABLE
from engines.description import EngineKind
from router.http.messages import RequestHead
from router.openai.any_json import decode_any
from router.openai.bodies import (
    ABSENT,
    LOOSE,
    STEERING,
    Adapter,
    Body,
    Chat,
    Completion,
    Inputs,
    PassedOn,
    Salt,
    Steering,
)
from router.openai.errors import BadRequest
from router.tokens import Endpoint, read_ids

_Body = TypeVar("_Body", bound=Steering)
_Read = TypeVar("_Read")

ENDPOINTS: dict[bytes, Endpoint] = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}

RENDERED: dict[bytes, tuple[str, ...]] = {
    b"/v1/responses": ("instructions", "tools", "input"),
    b"/v1/messages": ("system", "tools", "messages"),
}
"""What the model sees of a request on other paths, in order. How is each engine's own."""

INPUTS: dict[bytes, tuple[str, ...]] = {
    b"/v1/embeddings": ("input",),
    b"/v1/classify": ("input",),
    b"/classify": ("input_ids",),
    b"/v1/score": ("query", "items"),
}
"""Fields of requests on other paths that SGLang takes token ids in."""

MOST_PROMPTS = 2048
"""In one request: as many inputs as OpenAI takes."""


class Inference:
    """Its prompt, and what is said about it, as on the OpenAI path `endpoint`."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str | None,
        cache_salt: str | None,
        streamed: bool,
        raw: bytes,
        body: Completion | Chat,
        prompt_field: str,
        engine: EngineKind | None = None,
        recomputed: bool = False,
        uncached: bool = False,
    ) -> None:
        self.endpoint: Endpoint = endpoint
        self.model = model
        """As the request names it; None when it names none, or "", which is none to engines."""
        self.cache_salt = cache_salt
        self.streamed = streamed
        self.raw = raw
        self.body = body
        self.prompt_field = prompt_field
        """Of `raw`."""
        self.engine = engine
        """The only kind that takes requests of this form; None: all do."""
        self.recomputed = recomputed
        """The engine may compute all of its prompt again, whatever it holds: for the prompt's log probabilities."""
        self.uncached = uncached
        """It surely does."""

    @property
    def choices(self) -> int:
        """Answers that it asks for, to each of its prompts."""
        return max(1, self.body.n or 1, self.body.best_of or 1)

    def fields(self) -> dict[str, Any]:
        """What `PromptTokens` reads, as far as it is given; a prompt of token ids may be an array. A completion has
        none where its embeddings stand for it.

        Raises BadRequest for text that is not UTF-8, anywhere in the body, and ValidationError for valid JSON with a
        number that no float can hold.
        """
        return _decoded(partial(_read_fields, self.raw, self.body), self.raw)

    def whole(self) -> dict[str, Any]:
        """All that the request says of its prompt, as an OpenAI request does. Raises as `fields` does."""
        if self.engine:
            return {"model": self.model, **self.fields()}
        return _decoded(partial(decode_any, self.raw), self.raw)


_PLAIN = Body.__struct_fields__.index("add_special_tokens")
"""Fields of `Body` that are decoded at once."""
_MAY_BE_IDS = frozenset({"prompt", "input_ids", "input", "query"})
_LIST, _NULL = b"[n"
_NULL_OR_FALSE = b"nf"
_BATCH = re.compile(rb"\[\s*[\"\[]")
_HALF_AT_END = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]{1,5}\Z")
"""The first half of a surrogate pair alone, so near the end that msgspec misses bytes of the other half."""
_decode_completion = msgspec.json.Decoder(Completion).decode
_decode_chat = msgspec.json.Decoder(Chat).decode
_decode_adapter = msgspec.json.Decoder(Adapter).decode
_decode_inputs = msgspec.json.Decoder(Inputs).decode
_decode_passed_on = msgspec.json.Decoder(PassedOn).decode
_decode_steering = msgspec.json.Decoder(Steering).decode
_decode_loose_completion = msgspec.json.Decoder(Completion, strict=False).decode
_decode_loose_chat = msgspec.json.Decoder(Chat, strict=False).decode
_decode_loose_passed_on = msgspec.json.Decoder(PassedOn, strict=False).decode
_decode_batch = msgspec.json.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_PROMPTS)]).decode


def parse_inference(endpoint: Endpoint, raw: bytes) -> Inference:
    """Raises BadRequest for what is no such request. Messages never quote the body."""
    if endpoint == "chat":
        chat = read_as(_decode_any_chat, raw)
        _check("messages", chat.messages, b"[", "a list of messages")
        _check_batch("input_ids", chat.input_ids)
        again = _recomputed(chat)
        model, salt, streamed = chat.model or None, first_salt(chat.cache_salt), bool(chat.stream)
        return Inference(endpoint, model, salt, streamed, raw, chat, "messages", None, again, again)
    body = read_as(_decode_any_completion, raw)
    if not is_given(body.prompt) and is_given(body.prompt_embeds):
        body.prompt = ABSENT  # vLLM takes what the prompt would have been embedded as
    else:
        check_prompt("prompt", body.prompt)
    again, model, streamed = _recomputed(body), body.model or None, bool(body.stream)
    salt, uncached = first_salt(body.cache_salt), again and _is_uncached(body)
    return Inference(endpoint, model, salt, streamed, raw, body, "prompt", None, again, uncached)


def _recomputed(body: Body) -> bool:
    if body.prompt_logprobs is ABSENT and body.echo is ABSENT:
        return False
    return is_given(body.prompt_logprobs) or is_asked(body.echo)


def _is_uncached(body: Completion) -> bool:
    """Of one that may be: what is only echoed is not computed again."""
    return is_given(body.prompt_logprobs) or is_given(body.logprobs)


def first_salt(given: Salt) -> str | None:
    """That of the first prompt, which is the one that is looked up. "" is none to SGLang, and refused by vLLM."""
    return (next(iter(given), None) if isinstance(given, list) else given) or None


def read_as(decode: Callable[[bytes], _Read], raw: bytes) -> _Read:
    """The body as `decode` reads it. Raises BadRequest for what is no JSON, or has a wrong field."""
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from None
    except UNDECODABLE as error:
        raise _no_json(error, raw) from None


def is_given(field: msgspec.Raw) -> bool:
    return _first(field) != _NULL


def is_asked(field: msgspec.Raw) -> bool:
    """Whether it is given, and not false."""
    return _first(field) not in _NULL_OR_FALSE


def check_prompt(name: str, prompt: msgspec.Raw, kinds: bytes = b'"[', wanted: str = "a string or a list") -> None:
    """Raises BadRequest if the field `name` is no prompt, nor a list of no more than `MOST_PROMPTS`. `kinds`: the first
    bytes that it may have."""
    if _check(name, prompt, kinds, wanted) == _LIST:
        _check_batch(name, prompt)


def read_passed_on(raw: bytes, may_be_other: bool) -> PassedOn:
    """What any other request says in its JSON body; the model is None where it names none. `may_be_other`: it need not
    be JSON, and is then passed over. Raises BadRequest for what is no JSON, and for what no request may say."""
    try:
        said = decoded_as(_decode_passed_on, _decode_loose_passed_on, raw)
    except msgspec.ValidationError as error:
        if _param(error) is None:  # no object: nothing is said in it
            return PassedOn()
        raise _wrong_field(error) from None
    except UNDECODABLE as error:
        if may_be_other:
            return PassedOn()
        # Engines' parsers take more for JSON than RFC 8259 does, such as NaN or UTF-16, and would read on.
        raise _no_json(error, raw) from None
    said.model = said.model or None
    return said


def rendered_fields(head: RequestHead, raw: bytes) -> dict[str, Any]:
    """The whole body of a request on a path of `RENDERED`; {} for any other, and where it is no JSON object, or not to
    be read whole. An `input` that is a text is the message of a user that it becomes, as in the next turn's list."""
    if head.path not in RENDERED or head.method != b"POST":
        return {}
    try:
        fields = decode_any(raw)
    except UNDECODABLE:
        return {}
    if not isinstance(fields, dict):
        return {}
    said = fields.get("input")
    return {**fields, "input": [{"role": "user", "content": said}]} if isinstance(said, str) else fields


def asks_for_stream(head: RequestHead, said: PassedOn) -> bool:
    """Whether it is a request on a path of `RENDERED` that is to be answered piece by piece."""
    return head.path in RENDERED and head.method == b"POST" and bytes(said.stream) == b"true"


def inputs(path: bytes, raw: bytes) -> dict[str, Any]:
    """The lists in a request on a path of `INPUTS` that may be token ids; {} for any other, and where it cannot be
    read."""
    names = INPUTS.get(path)
    if names is None:
        return {}
    try:
        given = _decode_inputs(raw)
        fields = {name: getattr(given, name) for name in names}
        return {name: _read(name, value) for name, value in fields.items() if _first(value) == _LIST}
    except UNDECODABLE:
        return {}


def names_adapter(raw: bytes) -> bool:
    """Whether a body, in which a model was found, names one besides it."""
    return is_given(_decode_adapter(raw).lora_path)


def decoded_as(
    strict: Callable[[bytes], _Body],
    loose: Callable[[bytes], _Body],
    raw: bytes,
    steering: Callable[[bytes], object] = _decode_steering,
) -> _Body:
    """As `loose` reads it if a field of `LOOSE` needs that. `steering` decodes what no request may say."""
    try:
        return strict(raw)
    except msgspec.ValidationError as error:
        if (_param(error) or "").rpartition(".")[2] not in LOOSE:
            raise
    steering(raw)  # which stays strict: "null" is none to the loose one
    return loose(raw)


def _decode_any_chat(raw: bytes) -> Chat:
    return decoded_as(_decode_chat, _decode_loose_chat, raw)


def _decode_any_completion(raw: bytes) -> Completion:
    return decoded_as(_decode_completion, _decode_loose_completion, raw)


def _read_fields(raw: bytes, body: Completion | Chat) -> dict[str, Any]:
    if not raw.isascii():
        raw.decode()  # what was passed over may be no text
    given = [(name, getattr(body, name)) for name in body.__struct_fields__[_PLAIN:]]
    fields = {name: _read(name, value) for name, value in given if value is not ABSENT}
    transfer = body.kv_transfer_params
    if isinstance(body, Chat) and transfer and is_given(transfer.prompt_token_ids):
        fields["kv_transfer_params"] = {"prompt_token_ids": transfer.prompt_token_ids}
    return fields


def _wrong_field(error: msgspec.ValidationError) -> BadRequest:
    param = _param(error)
    if param and param.partition(".")[0] in STEERING:
        return BadRequest(400, f"The field {param!r} steers engines, and is not for clients to give.", param=param)
    return BadRequest(400, f"The request body has a wrong field: {error}.", param=param)


def _check(name: str, given: msgspec.Raw, kinds: bytes, wanted: str) -> int:
    """`kinds`: first bytes that the value may have; returns the one that it has."""
    first = _first(given)
    if first == _NULL:
        raise BadRequest(400, f"The field {name!r} is missing: it must be {wanted}.", param=name)
    if first not in kinds:
        raise BadRequest(400, f"The field {name!r} has the wrong type: it must be {wanted}.", param=name)
    return first


def _first(given: msgspec.Raw) -> int:
    """The value's first byte, and that of null for none. It may be long and is not copied."""
    value = memoryview(given)
    return value[0] if value.nbytes else _NULL


def _check_batch(name: str, prompt: msgspec.Raw) -> None:
    """One of token ids is no batch, and not looked through."""
    if _BATCH.match(memoryview(prompt)):
        try:
            _decode_batch(prompt)
        except msgspec.ValidationError:
            raise BadRequest(400, f"One request may hold {MOST_PROMPTS} prompts.", param=name) from None


def _read(name: str, raw: msgspec.Raw) -> Any:
    ids = read_ids(raw) if name in _MAY_BE_IDS else None
    return decode_any(raw) if ids is None else ids


def _decoded(decode: Callable[[], dict[str, Any]], raw: bytes) -> dict[str, Any]:
    """`raw`: what `decode` reads."""
    try:
        return decode()
    except msgspec.ValidationError:
        raise
    except UNDECODABLE as error:
        raise _no_json(error, raw) from None


def _no_json(error: Exception, raw: bytes) -> BadRequest:
    reason = str(error).rstrip(".") if raw.strip() else "it is empty"
    # msgspec's words for half of a surrogate pair, which say nothing to who has cut a text
    if "surrogate" in reason or "hex escape" in reason or ("truncated" in reason and _HALF_AT_END.search(raw[-11:])):
        reason = "half of a character (\\ud800 to \\udfff alone), as is left where text is cut within an emoji"
    return BadRequest(400, f"The request body is not valid JSON: {reason}.", code="invalid_json")


def _param(error: msgspec.ValidationError) -> str | None:
    """The field that msgspec's message names: "… - at `$.model`"."""
    _, found, path = str(error).rpartition("`$.")
    return path.rstrip("`") if found else None
