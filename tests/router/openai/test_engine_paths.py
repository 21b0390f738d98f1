"""Engines' own generate requests are read as completions."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.openai.bodies import MOST_CHOICES
from router.openai.engine_paths import GENERATE
from router.openai.errors import BadRequest
from router.openai.inference import MOST_PROMPTS, Inference

SGLANG, VLLM = b"/generate", b"/inference/v1/generate"


def read(path: bytes, body: object) -> Inference:
    return GENERATE[path](json.dumps(body).encode())


def fields(path: bytes, body: object) -> dict[str, Any]:
    found = read(path, body).fields()
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (SGLANG, {"text": "hi"}, {"prompt": "hi"}),
        (SGLANG, {"input_ids": [1, 2]}, {"prompt": [1, 2]}),
        (SGLANG, {"input_ids": [1, 2], "text": "hi"}, {"prompt": [1, 2]}),
        (SGLANG, {"input_ids": None, "text": ["hi", "ho"]}, {"prompt": ["hi", "ho"]}),
        (SGLANG, {"input_ids": [[1], [2]]}, {"prompt": [[1], [2]]}),
        (SGLANG, {"text": "hi", "extra_key": "k"}, {"prompt": "hi", "extra_key": "k"}),
        (SGLANG, {"text": "hi", "lora_path": None}, {"prompt": "hi", "lora_path": None}),
        (SGLANG, {"text": "hi", "image_data": [], "video_data": None}, {"prompt": "hi"}),
        (SGLANG, {"text": "hi", "image_data": "x"}, {"prompt": "hi", "media": {"type": "image", "data": ["x"]}}),
        (SGLANG, {"input_embeds": [[0.5]]}, {"prompt_embeds": [[0.5]]}),
        (SGLANG, {"input_embeds": [[0.5]], "input_ids": [1]}, {"prompt": [1]}),
        (SGLANG, {"input_embeds": [[0.5]], "text": "hi"}, {"prompt": "hi"}),
        (SGLANG, {"input_ids": [1], "session_params": {"id": "s"}}, {"prompt": [1], "session_params": {"id": "s"}}),
        (VLLM, {"token_ids": [1, 2], "sampling_params": {}}, {"prompt": [1, 2]}),
        (VLLM, {"token_ids": [1], "features": {}, "content_parts": [{}]},
         {"prompt": [1], "media": {"type": "image", "data": [[{}]]}}),
    ],
)  # fmt: skip
def test_what_the_model_sees_is_the_prompt(path: bytes, body: object, expected: dict[str, object]) -> None:
    assert fields(path, body) == expected


@pytest.mark.parametrize(
    ("body", "model", "salt", "streamed"),
    [
        ({"text": "hi"}, None, None, False),
        ({"text": "hi", "model": "m", "cache_salt": "s", "stream": True}, "m", "s", True),
        ({"text": ["hi"], "cache_salt": ["s"], "stream": None}, None, "s", False),
        ({"text": ["hi"], "cache_salt": [None], "model": ""}, None, None, False),
        ({"text": ["hi"], "cache_salt": []}, None, None, False),
    ],
)
def test_what_is_said_about_it(body: object, model: str | None, salt: str | None, streamed: bool) -> None:
    found = read(SGLANG, body)
    assert (found.model, found.cache_salt, found.streamed, found.engine) == (model, salt, streamed, "sglang")
    assert found.whole() == {"model": model, **found.fields()}, "as an engine is asked for the tokens of a completion"


@pytest.mark.parametrize(
    ("said", "model", "salt", "streamed"),
    [
        ({}, None, None, False),
        ({"model": "m", "cache_salt": "s", "stream": True}, "m", "s", True),
        ({"model": "", "stream": None}, None, None, False),
    ],
)
def test_what_is_said_about_token_ids(
    said: dict[str, object], model: str | None, salt: str | None, streamed: bool
) -> None:
    found = read(VLLM, {"token_ids": [1], **said})
    assert (found.model, found.cache_salt, found.streamed, found.engine) == (model, salt, streamed, "vllm")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (SGLANG, {}, "text"),
        (SGLANG, {"text": 5}, "text"),
        (SGLANG, {"input_ids": "hi", "text": "hi"}, "input_ids"),
        (SGLANG, {"text": ["hi"] * (MOST_PROMPTS + 1)}, "text"),
        (SGLANG, {"text": "hi", "sampling_params": {"n": MOST_CHOICES + 1}}, "sampling_params.n"),
        (SGLANG, {"text": "hi", "sampling_params": [{"n": 1}, {"n": MOST_CHOICES + 1}]}, "sampling_params[1].n"),
        (SGLANG, {"text": "hi", "bootstrap_host": "h"}, "bootstrap_host"),
        (SGLANG, {"text": "hi", "routed_dp_rank": 1}, "routed_dp_rank"),
        (SGLANG, {"text": "hi", "encoder_urls": ["http://h"]}, "encoder_urls"),
        (SGLANG, {"text": "hi", "kv_hints": {}}, "kv_hints"),
        (SGLANG, {"text": "hi", "mm_hashes": ["ff"]}, "mm_hashes"),
        (SGLANG, {"text": "hi", "positional_embed_overrides": {"positions": [1]}}, "positional_embed_overrides"),
        (SGLANG, {"text": "hi", "token_indices_to_pool": [1 << 40]}, "token_indices_to_pool"),
        (SGLANG, {"text": "hi", "multi_item_delimiter_indices": [9]}, "multi_item_delimiter_indices"),
        (SGLANG, {"text": "hi", "sampling_params": {"beam_width": MOST_CHOICES + 1}}, "sampling_params.beam_width"),
        (VLLM, {"token_ids": "hi"}, "token_ids"),
        (VLLM, {"sampling_params": {}}, "token_ids"),
        (VLLM, {"token_ids": [1], "ec_transfer_params": {}}, "ec_transfer_params"),
        (VLLM, {"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {}}}},
         "sampling_params.extra_args.kv_transfer_params"),
        (VLLM, {"token_ids": [1], "stream": 1, "sampling_params": {"extra_args": {"kv_transfer_params": "null"}}},
         "sampling_params.extra_args.kv_transfer_params"),
        (VLLM, {"token_ids": [1], "sampling_params": {"n": str(MOST_CHOICES + 1)}}, "sampling_params.n"),
    ],
)  # fmt: skip
def test_what_is_refused(path: bytes, body: object, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(path, body)
    error = msgspec.json.decode(caught.value.response.body)["error"]
    assert (caught.value.response.status, error["param"]) == (400, param)


@pytest.mark.parametrize(("stream", "n"), [(1, "2"), ("true", 2.0), (True, None)])
def test_vllm_takes_numbers_and_flags_in_other_forms(stream: object, n: object) -> None:
    assert read(VLLM, {"token_ids": [1], "stream": stream, "sampling_params": {"n": n}}).streamed


@pytest.mark.parametrize(
    ("path", "body", "recomputed"),
    [
        (SGLANG, {"text": "hi"}, False),
        (SGLANG, {"text": "hi", "return_logprob": True}, False),
        (SGLANG, {"text": "hi", "return_logprob": True, "logprob_start_len": -1}, False),
        (SGLANG, {"text": "hi", "return_logprob": False, "logprob_start_len": 0}, False),
        (SGLANG, {"text": "hi", "return_logprob": True, "logprob_start_len": 0}, True),
        (SGLANG, {"text": ["hi", "ho"], "return_logprob": [True, True], "logprob_start_len": [-1, 5]}, True),
        (VLLM, {"token_ids": [1]}, False),
        (VLLM, {"token_ids": [1], "sampling_params": {"prompt_logprobs": None, "skip_reading_prefix_cache": False}},
         False),
        (VLLM, {"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}}, True),
        (VLLM, {"token_ids": [1], "sampling_params": {"prompt_logprob_token_ids": [[1]]}}, True),
        (VLLM, {"token_ids": [1], "sampling_params": {"skip_reading_prefix_cache": True}}, True),
    ],
)  # fmt: skip
def test_whether_its_prompt_may_be_computed_again(path: bytes, body: object, recomputed: bool) -> None:
    assert read(path, body).recomputed is recomputed
    if path == VLLM:
        assert read(path, body).uncached is recomputed


@pytest.mark.parametrize(("start", "uncached"), [(0, True), ([0, 5], True), (5, False), ([5, 0], False), (-1, False)])
def test_sglang_computes_a_prompt_again_from_where_its_log_probabilities_begin(start: object, uncached: bool) -> None:
    body = {"text": "hi", "return_logprob": True, "logprob_start_len": start}
    assert read(SGLANG, body).uncached is uncached


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'{"text":"\xff"}', b"[" * 100_000])
def test_what_is_no_such_body_is_refused(path: bytes, body: bytes) -> None:
    with pytest.raises(BadRequest):
        GENERATE[path](body).fields()


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        (SGLANG, {"text": "a"}, 1),
        (SGLANG, {"text": "a", "sampling_params": {"n": 3}}, 3),
        (SGLANG, {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 4}]}, 2),
        (SGLANG, {"text": [], "sampling_params": []}, 1),
        (VLLM, {"token_ids": [1]}, 1),
        (VLLM, {"token_ids": [1], "sampling_params": {"n": 3.0}}, 3),
        (VLLM, {"token_ids": [1], "sampling_params": {"n": -2}}, 1),
    ],
)
def test_how_many_answers_a_generate_request_asks_for(path: bytes, body: dict[str, Any], choices: int) -> None:
    assert read(path, body).choices == choices
