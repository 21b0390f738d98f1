"""What all connectors share: the parts of a split request, and a body's fields as the client wrote them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import msgspec

from engines.answers import UNDECODABLE, decoded
from engines.versions import Version, is_before

Body: TypeAlias = dict[str, msgspec.Raw]
"""A request's fields, each as the client wrote it. Bodies are never changed in place."""
_T = TypeVar("_T")

TRANSFER = "kv_transfer_params"
PROBABILITIES_OF_PROMPT = (
    "it asks for the log probabilities of its prompt, which only the worker knows that computes it"
)
"""Why a request cannot be split, for people."""
_NULL = b"null"
_BATCH = re.compile(rb'\[\s*["\[]')
_NOT_FOR_ONE_TOKEN = ("stream_options", "min_tokens", "n", "best_of")
_LIMITS = ("max_tokens", "max_completion_tokens")
_ENDS_EARLY = ("stop", "stop_token_ids")
_TAKES_HALF_A_CALL: Version = (0, 21, 0)
"""Before this version vLLM answers 400 or 500 if it cannot parse the tool call that `tool_choice` demands out of the
answer (entrypoints/openai/engine/serving.py), as with an answer of one token: up to 0.17 always, up to 0.20 with a
named tool when the answer is all reasoning."""

_decode_body = msgspec.json.Decoder(Body).decode
_decode = msgspec.json.Decoder().decode
_decode_count = msgspec.json.Decoder(int | None, strict=False).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Prefiller(NamedTuple):
    """The prefill rank of a split request: what a connector may need to tell the decode worker about it."""

    host: str
    """Of the worker's URL."""
    dp_rank: int = 0
    dp_size: int = 1
    bootstrap_port: int | None = None
    engine_ids: Mapping[int, str] = {}
    """By data-parallel rank, where the connector's bootstrap server tells them."""
    coordinates: Mapping[str, Any] | None = None
    """Where to register for a push, from an earlier answer of the worker; None before the first answer."""
    version: str | None = None
    """Of its engine; None: unknown."""


class Handover(NamedTuple):
    """The transfer of one request's KV from prefill to decode."""

    prefiller: Prefiller
    number: int
    """Identifies the transfer; drawn at random from 63 bits."""

    @property
    def name(self) -> str:
        return f"xfer-{self.number:016x}"


class Connector(ABC):
    """One way of moving KV between two engines of a kind."""

    pushes: ClassVar[bool] = False
    """The prefill worker writes KV while it computes, so that little of the transfer is left when it is done."""

    def refuses(self, body: Body, room: int | None = None) -> str | None:
        """Why this request cannot be split, for people; None when it can. `room`: tokens of the model's context that
        its prompt leaves; None: unknown."""
        return length_matters(body, room) or probabilities_of_prompt(body)

    def lacks(self, prefiller: Prefiller) -> str | None:  # noqa: ARG002 -- for those that need to know something
        """What must be known of the worker before requests can be split with it, and is not; None: nothing."""
        return None

    def together(self, prefiller: Prefiller) -> bool:  # noqa: ARG002 -- for those of which it depends
        """Whether both legs are sent at once; else the decode leg needs what the prefill leg answers."""
        return self.pushes

    @abstractmethod
    def prefill(self, body: Body, handover: Handover) -> Body:
        """What the prefill worker is asked."""

    @abstractmethod
    def decode(self, body: Body, handover: Handover, returned: msgspec.Raw | None) -> Body:
        """What the decode worker is asked. `returned`: the `kv_transfer_params` that the prefill leg answered. Raises
        ValueError where they are needed and missing."""


class SingleSequenceConnector(Connector):
    """One that hands over the KV of one sequence for each request, as vLLM's point-to-point connectors do."""

    def refuses(self, body: Body, room: int | None = None) -> str | None:
        return several_sequences(body) or super().refuses(body, room)


def read_body(raw: bytes | msgspec.Raw) -> Body:
    """The fields of a JSON object, undecoded. Raises ValueError for anything else, and for names that are not UTF-8."""
    return decoded(_decode_body, raw)


def write_body(body: Body) -> bytes:
    return msgspec.json.encode(body)


def first_token_only(body: Body, prefiller: Prefiller) -> Body:
    """The same request, for one token and not streamed. What no worker would serve stays so."""
    kept = {name: value for name, value in body.items() if name not in _NOT_FOR_ONE_TOKEN}
    kept |= {"max_tokens": raw(1), "stream": raw(False)}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = raw(1)
    if is_before(prefiller.version, _TAKES_HALF_A_CALL) and value_of(body, "tool_choice") not in (None, "auto", "none"):
        kept["tool_choice"] = raw(None)  # the tools stay in the prompt
    return kept | {name: body[name] for name in _refused(body) if name in body}


def _refused(body: Body) -> tuple[str, ...]:
    """Of the fields that are not for one token, those for which vLLM refuses the request. They stay, so that the
    prefill worker does: else the decode worker would, when the prompt is computed and its KV kept until its lease ends.
    """
    limit, least = answer_limit(body), count_of(body, "min_tokens") or 0
    if limit is not None and 0 < limit < least:
        return (*_LIMITS, "min_tokens")
    below = (name for name in _LIMITS if (count := count_of(body, name)) is not None and count < 1)
    return (*below, *(() if value_of(body, "stream") else ("stream_options",)))


def first_token_by_length(body: Body, prefiller: Prefiller) -> Body:
    """The same, so that it ends because of its length whatever the token is: MooncakeConnector (vLLM 0.13 to 0.32), and
    NixlConnector before vLLM 0.21, hand over KV only of prefills that end so."""
    kept = {name: value for name, value in first_token_only(body, prefiller).items() if name not in _ENDS_EARLY}
    return {**kept, "ignore_eos": raw(True)}


def with_transfer(body: Body, params: Mapping[str, Any]) -> Body:
    """`body` with these `kv_transfer_params`; of the client's own, only the prompt's tokens are kept."""
    ids = token_ids_in(body)
    named = {} if ids is None else {"prompt_token_ids": ids}
    return {**body, TRANSFER: raw({**params, **named})}


def token_ids_in(body: Body) -> msgspec.Raw | None:
    """The prompt's tokens as the client wrote them in `kv_transfer_params`; None if it did not."""
    given = body.get(TRANSFER)
    if given is None or not bytes(given).startswith(b"{"):
        return None
    try:
        ids = read_body(given).get("prompt_token_ids")
    except ValueError:  # a name that is not UTF-8
        return None
    return None if ids is None or bytes(ids) == _NULL else ids


def value_of(body: Body, name: str) -> Any:
    """The field's value; None if it is missing or cannot be decoded: a number that no float can hold, text that is not
    UTF-8, or what is nested too deeply."""
    return _value(_decode, body.get(name))


def count_of(body: Body, name: str) -> int | None:
    """The field as a whole number, in all forms that engines accept for one, such as 2.0 and "2"; None for others."""
    return _value(_decode_count, body.get(name))


def _value(decode: Callable[[msgspec.Raw], _T], given: msgspec.Raw | None) -> _T | None:
    try:
        return None if given is None else decode(given)
    except UNDECODABLE:
        return None


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def prompts_in(body: Body) -> int:
    """How many prompts a request holds: of an OpenAI path, or of SGLang's /generate."""
    return max(1, *(_entries(body.get(name)) for name in ("prompt", "text", "input_ids")))


def _entries(given: msgspec.Raw | None) -> int:
    if given is None or (written := memoryview(given)) == _NULL:
        return 0
    # One of tokens is long, and not looked through.
    items = _value(_decode_items, given) if _BATCH.match(written) else None
    return len(items) if items else 1


def answers_wanted(body: Body) -> int:
    """How many answers the request wants for each prompt."""
    wanted = (count_of(body, name) for name in ("n", "best_of"))
    return max((count for count in wanted if count is not None), default=1)


def answer_limit(body: Body) -> int | None:
    """The limit that the request sets for the tokens of each answer, the highest of several; None: it sets none."""
    if "sampling_params" in body and "prompt" not in body and "messages" not in body:
        limits = [params.get(name) for params in samplings(body) for name in ("max_new_tokens", "max_tokens")]
        return max((int(limit) for limit in limits if isinstance(limit, int | float)), default=None)
    names = ("max_completion_tokens", "max_tokens") if "messages" in body else ("max_tokens",)
    given = (count_of(body, name) for name in names)
    return next((limit for limit in given if limit is not None), None)


def samplings(body: Body) -> list[dict[str, Any]]:
    """The sampling parameters of an engine's own generate request, where each prompt may have its own."""
    given = value_of(body, "sampling_params")
    return [params for params in (given if isinstance(given, list) else [given]) if isinstance(params, dict)]


def several_sequences(body: Body) -> str | None:
    """Why a connector that hands over the KV of one sequence cannot serve the request; None when it can.

    Each answer to a prompt would fetch the KV again, but vLLM 0.32's prefill workers free it after the first fetch: the
    next one waits for it until VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s), or reads what another prompt has written
    there.
    """
    if _entries(body.get("prompt")) + _entries(body.get("prompt_embeds")) > 1:  # vLLM answers to both
        return "it holds several prompts, and the connector is told of one sequence's KV"
    if answers_wanted(body) > 1:
        return "it asks for several answers (n or best_of), and the connector hands over KV for one"
    if value_of(body, "use_beam_search"):  # its steps are requests of their own, which no parameters go with
        return "it asks for beam search, and the connector hands over KV for one answer"
    return None


def length_matters(body: Body, room: int | None) -> str | None:
    """Why no connector of vLLM can serve the request; None when one can. vLLM cuts or refuses a prompt by the room that
    the answer leaves in the context (renderers/params.py), and the prefill asks for an answer of one token only.

    So a prompt that is to be cut would be a different one on the decode worker, which would continue from the prefill's
    KV all the same. And one that is too long would be computed first, and its KV kept until its lease ends.
    """
    kept, limit = count_of(body, "truncate_prompt_tokens"), answer_limit(body)
    if kept is not None and kept < 0:
        return (
            "its prompt is cut to what the answer leaves room for (truncate_prompt_tokens), so that both parts differ"
        )
    if room is not None and limit is not None and limit > room:
        return f"it asks for {limit} tokens, and its prompt leaves room for {max(0, room)} in the model's context"
    return None


def probabilities_of_prompt(body: Body) -> str | None:
    """Why no connector can serve the request; None when one can.

    The decode worker has not computed the prompt. vLLM before 0.31 answers from memory that was never written, which
    crashes its front end (vllm-project/vllm#50792); SGLang 0.5.23 leaves the probabilities out. vLLM takes an echoed
    chat to ask for them too.
    """
    echoed = value_of(body, "echo") and ("messages" in body or value_of(body, "logprobs") is not None)
    if echoed or value_of(body, "prompt_logprobs") is not None:
        return PROBABILITIES_OF_PROMPT
    return None
