"""What all connectors share: the parts of a split request, and a body's fields as they came."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec

from engines.versions import Version, is_before

Body: TypeAlias = dict[str, msgspec.Raw]
"""A request's fields, each as the client wrote it; none is changed in place."""

TRANSFER = "kv_transfer_params"
_NULL = b"null"
_BATCH = re.compile(rb'\[\s*["\[]')
_NOT_FOR_ONE_TOKEN = ("stream_options", "min_tokens", "n", "best_of")
_ENDS_EARLY = ("stop", "stop_token_ids")
_TAKES_HALF_A_CALL: Version = (0, 21, 0)
"""Before, vLLM answers 400 or 500 where it cannot read the tool call that `tool_choice` wants out of the answer
(entrypoints/openai/engine/serving.py): up to 0.17 whichever, up to 0.20 one of a name where all is reasoning."""

_decode_body = msgspec.json.Decoder(Body).decode
_decode = msgspec.json.Decoder().decode
_decode_count = msgspec.json.Decoder(int | None, strict=False).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Prefiller(NamedTuple):
    """The prefill rank of a split request, as a decode worker must be told of it."""

    host: str
    """Of the worker's URL."""
    dp_rank: int = 0
    dp_size: int = 1
    bootstrap_port: int | None = None
    engine_ids: Mapping[int, str] = {}
    """By data-parallel rank, where the connector's bootstrap server tells them."""
    coordinates: Mapping[str, Any] | None = None
    """What an earlier answer told of where to register for a push; None before the first."""
    version: str | None = None
    """Of its engine; None: it does not tell."""


class Handover(NamedTuple):
    """One request's way from prefill to decode."""

    prefiller: Prefiller
    number: int
    """Names the transfer; drawn at random from 63 bits."""

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
    """An object's fields, as they came. Raises ValueError for anything else, and where a field's name is no text."""
    return _decode_body(raw)


def write_body(body: Body) -> bytes:
    return msgspec.json.encode(body)


def first_token_only(body: Body, prefiller: Prefiller) -> Body:
    """The same prompt, for one token in one piece."""
    kept = {name: value for name, value in body.items() if name not in _NOT_FOR_ONE_TOKEN}
    kept |= {"max_tokens": raw(1), "stream": raw(False)}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = raw(1)
    if is_before(prefiller.version, _TAKES_HALF_A_CALL) and value_of(body, "tool_choice") not in (None, "auto", "none"):
        kept["tool_choice"] = raw(None)  # the tools stay in the prompt
    return kept


def first_token_by_length(body: Body, prefiller: Prefiller) -> Body:
    """The same, which ends by its length, whatever the token is: MooncakeConnector (vLLM 0.13 to 0.32) hands over no
    other prefill's KV, nor does NixlConnector before vLLM 0.21."""
    kept = {name: value for name, value in first_token_only(body, prefiller).items() if name not in _ENDS_EARLY}
    return {**kept, "ignore_eos": raw(True)}


def with_transfer(body: Body, params: Mapping[str, Any]) -> Body:
    """With `params`, and of what the client said there only the prompt's tokens."""
    ids = token_ids_in(body)
    named = {} if ids is None else {"prompt_token_ids": ids}
    return {**body, TRANSFER: raw({**params, **named})}


def token_ids_in(body: Body) -> msgspec.Raw | None:
    """The prompt's tokens where the client says them in `kv_transfer_params`, as it wrote them."""
    given = body.get(TRANSFER)
    if given is None or not bytes(given).startswith(b"{"):
        return None
    try:
        ids = read_body(given).get("prompt_token_ids")
    except ValueError:  # a name that is no text
        return None
    return None if ids is None or bytes(ids) == _NULL else ids


def value_of(body: Body, name: str) -> Any:
    """None for what is not given, and for what nobody can read: a number that no float can hold, bytes that are no
    text."""
    given = body.get(name)
    try:
        return None if given is None else _decode(given)
    except ValueError:
        return None


def count_of(body: Body, name: str) -> int | None:
    """A whole number, in each form that engines take for one, as 2.0 and "2"; None for what is none."""
    given = body.get(name)
    try:
        return None if given is None else _decode_count(given)
    except ValueError:
        return None


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def prompts_in(body: Body) -> int:
    """How many prompts a request holds."""
    return max(1, _entries(body.get("prompt")))


def _entries(given: msgspec.Raw | None) -> int:
    if given is None or (written := memoryview(given)) == _NULL:
        return 0
    return len(_decode_items(given)) if _BATCH.match(written) else 1  # one of tokens is long, and not looked through


def answers_wanted(body: Body) -> int:
    """For each prompt."""
    wanted = (count_of(body, name) for name in ("n", "best_of"))
    return max((count for count in wanted if count is not None), default=1)


def answer_limit(body: Body) -> int | None:
    """Tokens that each answer may have, as far as the request says."""
    names = ("max_completion_tokens", "max_tokens") if "messages" in body else ("max_tokens",)
    given = (count_of(body, name) for name in names)
    return next((limit for limit in given if limit is not None), None)


def several_sequences(body: Body) -> str | None:
    """Why a connector that is told of one sequence's KV cannot serve the request; None when it can.

    Each answer to a prompt fetches the KV anew, and vLLM 0.32's prefill workers let it go with the first that did: the
    next waits for it until VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s), or reads what another prompt wrote over it.
    """
    if _entries(body.get("prompt")) + _entries(body.get("prompt_embeds")) > 1:  # vLLM answers to both
        return "it holds several prompts, and the connector is told of one sequence's KV"
    if answers_wanted(body) > 1:
        return "it asks for several answers (n or best_of), and the connector hands over KV for one"
    if value_of(body, "use_beam_search"):  # its steps are requests of their own, which no parameters go with
        return "it asks for beam search, and the connector hands over KV for one answer"
    return None


def length_matters(body: Body, room: int | None) -> str | None:
    """Why no connector of vLLM can serve the request; None when it can. The prefill is for one token, and vLLM judges a
    prompt by what the answer leaves of the context (renderers/params.py).

    One that is to be cut so would be another prompt to the decode, which would go on from the prefill's KV all the
    same. And one that is too long would be computed first, and its KV kept until its lease ends.
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
    """Why no connector can serve the request; None when it can.

    Who decodes has not computed the prompt. vLLM before 0.31 answers from memory that was never written, of which its
    front end dies (vllm-project/vllm#50792); SGLang 0.5.23 leaves them out. vLLM takes an echoed chat to mean them too.
    """
    echoed = value_of(body, "echo") and ("messages" in body or value_of(body, "logprobs") is not None)
    if echoed or value_of(body, "prompt_logprobs") is not None:
        return "it asks for the log probabilities of its prompt, which only the worker knows that computes it"
    return None
