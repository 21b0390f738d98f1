"""Bodies of requests: the few fields that the router reads are what a JSON parser reads."""

from __future__ import annotations

import json
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from router.openai.engine_paths import GENERATE
from router.openai.errors import BadRequest
from router.openai.inference import Inference, parse_inference, read_passed_on
from router.tokens import Endpoint, read_ids, stand_ins
from tests.engines.recordings import RECORDINGS, exchanges
from tests.fuzz.target import DEEP_JSON, JSON, Target, place

_ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat")
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode


def _body(data: bytes) -> Hashable:
    """BadRequest, and nothing else."""
    with suppress(BadRequest):
        read_passed_on(data, may_be_other=True)
    for read in GENERATE.values():
        with suppress(BadRequest, msgspec.ValidationError):
            read(data).fields()
    return tuple(_parsed(endpoint, data) for endpoint in _ENDPOINTS)


def _parsed(endpoint: Endpoint, data: bytes) -> Hashable:
    try:
        found = parse_inference(endpoint, data)
        fields = found.fields()
    except (BadRequest, msgspec.ValidationError) as error:
        return place(error), str(error).partition(":")[0]
    _compare(found, fields, data)
    return tuple(fields), found.streamed, type(fields.get("prompt"))


def _compare(found: Inference, fields: dict[str, Any], data: bytes) -> None:
    """Where the standard library's parser takes it too: it also takes NaN, and reads more digits of a float."""
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError):
        return
    salt = plain.get("cache_salt")
    assert found.cache_salt == ((next(iter(salt), None) if isinstance(salt, list) else salt) or None)
    assert (found.model, found.streamed) == (plain.get("model") or None, bool(plain.get("stream")))
    prompt = fields.get("prompt")
    assert (
        isinstance(fields["messages"], list)
        if found.endpoint == "chat"
        else isinstance(prompt, str | list | np.ndarray)
        or {"prompt", "prompt_embeds"} & fields.keys() == {"prompt_embeds"}
    )
    if isinstance(prompt, np.ndarray):
        assert prompt.tolist() == plain["prompt"]
    elif isinstance(prompt, str):
        assert prompt == plain["prompt"]
    assert read_passed_on(data, may_be_other=False).model == found.model


def _ids(data: bytes) -> Hashable:
    """Token ids are read by compiled code as by msgspec."""
    try:
        raw = _decode_raw(data)
        plain = JSON.decode(raw)
    except (ValueError, RecursionError):
        return "no JSON"
    ids = read_ids(raw)
    flat = isinstance(plain, list) and all(type(each) is int and 0 <= each < 2**32 for each in plain)
    assert ids.tolist() == plain if ids is not None else not flat or not plain or b"-0" in data
    return ids is None, flat, len(plain) if isinstance(plain, list) and len(plain) < 9 else -1


def _stand_ins(data: bytes) -> Hashable:
    """Whatever JSON it is, it is stood for; and more of it by more."""
    try:
        said = JSON.decode(data)
    except (ValueError, RecursionError):
        return "no JSON"
    found = stand_ins([said])
    assert stand_ins([said, "more"])[: len(found)].tolist() == found.tolist()
    return type(said), min(len(found), 9)


def _conversations() -> list[bytes]:
    image = {"type": "image", "source": {"data": "AAAA"}}
    said: list[object] = [{"role": "user", "content": [{"type": "text", "text": "é", "cache_control": {}}, image]}]
    return [*_bodies(), JSON.encode(said), JSON.encode({"system": ["a", None, 5], "messages": [{"type": [image]}]})]


def _bodies() -> list[bytes]:
    """Recorded requests, and what else a body may say."""
    found = [each["request"]["body"] for recording in RECORDINGS for each in exchanges(recording.name)]
    made: list[object] = [
        {"model": "m", "prompt": [1, 2, 3], "stream": True, "cache_salt": "s", "add_special_tokens": False},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}], "tools": [], "documents": []},
        {"prompt": ["a", "b"], "truncate_prompt_tokens": -1, "prompt_embeds": "x"},
        {"model": "", "prompt": None, "prompt_embeds": "x"},
        {
            "text": ["a"],
            "sampling_params": [{"n": 1}],
            "return_logprob": True,
            "logprob_start_len": [0],
            "cache_salt": ["s"],
        },
        {"input_ids": [1], "image_data": "x", "sampling_params": {"n": 1, "beam_width": 2}, "session_params": {}},
        {"token_ids": [1], "stream": 1, "sampling_params": {"n": "1", "extra_args": {}, "prompt_logprobs": 0}},
    ]
    return list(dict.fromkeys(JSON.encode(body) for body in (*found, *made) if isinstance(body, dict)))


def _lists() -> list[bytes]:
    return [
        b"[1,2,3]",
        b"[ 1 , 2 ]",
        b"[4294967295,0]",
        b"[]",
        b"[[1],[2]]",
        b'["a"]',
        b"[1.0]",
        b"[-0]",
        b"[1e3]",
        b"\t[7\n]",
    ]


_WORDS = (
    *DEEP_JSON, b'"prompt":', b'"messages":', b'"model":null', b'"stream":true', b'"stream":1',
    b'"cache_salt":"\\ud800"', b'"\\u0000"', b"1e999", b"-0", b"4294967296", b"4294967295", b"NaN", b"\xff",
    b"\xed\xa0\x80", b"[1,2]", b"[[1]]", b",", b" ", b"\n", b"null", b'"a":1', b"9" * 4400, b'"model":"a"',
)  # fmt: skip

TARGETS = (
    Target("inference", _body, _bodies, _WORDS, JSON),
    Target("stand-ins", _stand_ins, _conversations, (*_WORDS, b'"type":"image"', b'"type":'), JSON),
    Target("token-ids", _ids, _lists, _WORDS, JSON),
)
