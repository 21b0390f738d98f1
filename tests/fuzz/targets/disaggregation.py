"""Requests that are split in two: bodies of clients made into legs, and what the prefill worker answers."""

from __future__ import annotations

from collections.abc import Hashable

from engines.disaggregation import CONNECTORS, Handover, Prefiller
from engines.disaggregation.answer import coordinates, read_answer
from engines.disaggregation.legs import answer_limit, read_body, write_body
from engines.disaggregation.mooncake import read_bootstrap
from router.openai.errors import BadRequest
from router.openai.inference import parse_inference
from tests.engines.recordings import exchanges
from tests.fuzz.target import DEEP_JSON, JSON, Target, place

_RECORDED = ("vllm-0.32.0-pd-nixl", "vllm-0.32.0-pd-mooncake")
_PREFILLER = Prefiller("10.0.0.7", 1, 2, 8998, {1: "engine"}, {"remote_host": "h"})


def _answer(data: bytes) -> Hashable:
    """ValueError, and nothing else; where to register is read of whatever was answered."""
    engines = read_bootstrap(data)
    try:
        found = read_answer(data)
    except ValueError as error:
        return place(error), len(engines)
    told = coordinates(found.params) if found.params is not None else None
    return found.params is None, found.cached_tokens is None, told and tuple(told), len(engines)


def _legs(data: bytes) -> Hashable:
    """A body that the router takes is split by every connector, or refused with a reason, or told to want something."""
    try:
        parse_inference("completions", data)
        body = read_body(data)
    except (BadRequest, ValueError) as error:
        return place(error)
    told = []
    for name, connector in CONNECTORS.items():
        refusal = connector.refuses(body)
        told.append((name, refusal))
        if refusal is None:
            handover = Handover(_PREFILLER, 2**63 - 1)
            legs = [connector.prefill(body, handover), connector.decode(body, handover, _RETURNED)]
            for leg in map(write_body, legs):
                assert bytes(read_body(leg)["prompt"]) == bytes(body["prompt"])
                assert len(leg) < len(data) * 50 + 1000  # of each prompt a host, a port and a room
    return tuple(told), answer_limit(body)


_RETURNED = read_answer(b'{"kv_transfer_params":{"remote_host":"h","remote_port":1}}').params


def _answers() -> list[bytes]:
    """Also those of the bootstrap server."""
    bodies = [each["response"]["body"] for name in _RECORDED for each in exchanges(name)]
    return [JSON.encode(body) for body in bodies if isinstance(body, dict)]


def _bodies() -> list[bytes]:
    bodies = [each["request"]["body"] for name in _RECORDED for each in exchanges(name)]
    made = [{"prompt": ["a", "b"], "n": 2}, {"prompt": [[1, 2], [3]], "best_of": 2}, {"prompt": "a", "stop": ["x"]}]
    return [JSON.encode(body) for body in (*bodies, *made) if isinstance(body, dict) and "prompt" in body]


_WORDS = (
    *DEEP_JSON, b'"kv_transfer_params":', b'"transfer_mode":"push"', b'"remote_engine_id":"e"',
    b'"prompt_token_ids":[1]', b"null", b'"usage":{"prompt_tokens_details":{"cached_tokens":5}}',
    b'"0":{"engine_id":"e"}', b'"n":2', b'"best_of":1e999', b'"prompt":', b'"\\ud800"', b'["a"]', b"[[1]]", b"{}",
    b"[]", b"\xff", b'"max_tokens":', b" ",
)  # fmt: skip

TARGETS = (
    Target("prefill-answers", _answer, _answers, _WORDS, JSON),
    Target("legs", _legs, _bodies, _WORDS, JSON, share=50),
)
