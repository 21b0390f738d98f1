"""A request's few fields are read, the rest is passed over, and nothing makes reading fail but with a 400."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.messages import RequestHead
from router.openai.errors import BadRequest
from router.openai.inference import (
    ENDPOINTS,
    MOST_PROMPTS,
    asks_for_stream,
    names_adapter,
    parse_inference,
    read_passed_on,
)
from router.openai.kept_responses import PATH, Kept, read_kept
from router.tokens import Endpoint
from tests.router.scheduling.candidates import repeatable

DEEP = b"[" * 100_000 + b"]" * 100_000


def refusal(endpoint: Endpoint, raw: bytes) -> dict[str, object]:
    with pytest.raises(BadRequest) as caught:
        parse_inference(endpoint, raw).fields()
    assert caught.value.response.status == 400
    error: dict[str, object] = msgspec.json.decode(caught.value.response.body)["error"]
    assert error["type"] == "invalid_request_error"
    assert str(error["message"]).endswith(".")
    assert not str(error["message"]).endswith("..")
    return error


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{"role":"user","content":"cut \\ud83d"}]}',  # msgspec: "Input data was truncated"
        b'{"messages":[{"role":"user","content":"cut \\uD83D, and more"}],"max_tokens":16}',
        b'{"messages":[{"role":"user","content":"\\ude42 begins with the other half"}],"max_tokens":16}',
    ],
)
def test_half_an_emoji_is_named_as_what_is_wrong(raw: bytes) -> None:
    assert "half of a character" in str(refusal("chat", raw)["message"])
    with pytest.raises(BadRequest, match="half of a character"):
        read_passed_on(raw, may_be_other=False)


@pytest.mark.parametrize("raw", [b"", b" \r\n"])
def test_an_empty_body_is_named_so(raw: bytes) -> None:
    assert refusal("chat", raw)["message"] == "The request body is not valid JSON: it is empty."


@pytest.mark.parametrize("raw", [b'{"messages":[{"content":"\\ud83d\\ude42', b'{"messages":[{"content":"\\ud7ff"}]'])
def test_what_is_only_cut_short_is_named_so(raw: bytes) -> None:
    assert "truncated" in str(refusal("chat", raw)["message"])


def test_the_endpoints() -> None:
    assert ENDPOINTS == {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}


@pytest.mark.parametrize(
    ("endpoint", "raw", "model", "salt"),
    [
        ("completions", b'{"prompt": "hi"}', None, None),
        ("completions", b'{"model": "m", "prompt": [1, 2]}', "m", None),
        ("completions", b' {"prompt":\n"hi", "model": null, "cache_salt": "s"} ', None, "s"),
        ("completions", b'{"prompt": ["hi", "you"], "cache_salt": ["s", "t"]}', None, "s"),  # SGLang's
        ("completions", b'{"prompt": ["hi"], "cache_salt": []}', None, None),
        ("completions", b'{"prompt": ["hi", "you"], "cache_salt": ["", "t"]}', None, None),
        ("chat", b'{"messages": [], "cache_salt": ""}', None, None),  # none to SGLang; vLLM refuses it
        ("completions", b'{"prompt": "hi", "model": "\xc3\xa9", "unknown": {"model": 3}}', "é", None),
        ("chat", b'{"messages": [], "model": "m", "prompt": 3}', "m", None),
        ("chat", b'{"messages": [{}], "model": "a", "model": "b"}', "b", None),
        ("chat", b'{"messages": [], "model": ""}', None, None),  # engines take it for none
    ],
)
def test_what_is_read(endpoint: Endpoint, raw: bytes, model: str | None, salt: str | None) -> None:
    found = parse_inference(endpoint, raw)
    assert (found.endpoint, found.model, found.cache_salt, found.raw) == (endpoint, model, salt, raw)
    assert found.whole() == msgspec.json.decode(raw)


@pytest.mark.parametrize(
    ("endpoint", "raw", "fields"),
    [
        ("completions", b'{"prompt": "hi", "seed": 1e999, "messages": [], "tools": []}', {"prompt": "hi"}),
        ("completions", b'{"prompt": [""], "prompt_embeds": null}', {"prompt": [""], "prompt_embeds": None}),
        ("completions", b'{"prompt": [[1]], "prompt_embeds": 3}', {"prompt": [[1]], "prompt_embeds": 3}),
        ("completions", b'{"prompt_embeds": "x"}', {"prompt_embeds": "x"}),
        ("completions", b'{"prompt": null, "prompt_embeds": ["x"]}', {"prompt_embeds": ["x"]}),
        ("chat", b'{"messages": [], "prompt": "hi", "tools": [{}]}', {"messages": [], "tools": [{}]}),
    ],
)
def test_only_what_the_tokenizer_reads_is_decoded(endpoint: Endpoint, raw: bytes, fields: dict[str, object]) -> None:
    assert parse_inference(endpoint, raw).fields() == fields


def test_token_ids_are_an_array() -> None:
    prompt = parse_inference("completions", b'{"prompt": [1, 2]}').fields()["prompt"]
    assert isinstance(prompt, np.ndarray)
    assert prompt.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("endpoint", "raw", "param", "words"),
    [
        ("completions", b"{}", "prompt", "'prompt' is missing"),
        ("completions", b'{"prompt": null}', "prompt", "'prompt' is missing"),
        ("completions", b'{"prompt_embeds": null}', "prompt", "'prompt' is missing"),
        ("completions", b'{"prompt": 3, "prompt_embeds": "x"}', "prompt", "wrong type"),
        ("completions", b'{"prompt": 3}', "prompt", "wrong type"),
        ("completions", b'{"prompt": {"a": 1}}', "prompt", "a string or a list"),
        ("completions", b'{"prompt": true}', "prompt", "wrong type"),
        ("chat", b'{"prompt": "hi"}', "messages", "'messages' is missing"),
        ("chat", b'{"messages": "hi"}', "messages", "a list of messages"),
        ("chat", b'{"messages": [], "model": 3}', "model", "wrong field"),
        ("completions", b'{"prompt": "a", "cache_salt": {}}', "cache_salt", "wrong field"),
        ("completions", b"[]", None, "wrong field"),
        ("completions", b'"hi"', None, "wrong field"),
    ],
)
def test_a_wrong_field_is_named(endpoint: Endpoint, raw: bytes, param: str | None, words: str) -> None:
    error = refusal(endpoint, raw)
    assert error["param"] == param
    assert words in str(error["message"])


@pytest.mark.parametrize(
    ("fields", "streamed", "choices"),
    [
        (b'"n": 2.0', False, 2),
        (b'"n": "2", "stream": 1', True, 2),
        (b'"stream": "false"', False, None),
        (b'"best_of": 3.0, "n": 1.0, "stream": "true"', True, 1),
    ],
)
@pytest.mark.parametrize(("endpoint", "prompt"), [("completions", b'"prompt": "a"'), ("chat", b'"messages": []')])
def test_numbers_and_flags_may_be_written_as_engines_take_them(
    endpoint: Endpoint, prompt: bytes, fields: bytes, streamed: bool, choices: int | None
) -> None:
    raw = b'{"model": "m", %s, %s}' % (prompt, fields)
    found = parse_inference(endpoint, raw)
    assert (found.model, found.streamed, found.body.n, found.raw) == ("m", streamed, choices, raw)
    assert read_passed_on(raw, may_be_other=False).model == "m"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"n": "129"', "n"),
        (b'"n": 1.5', "n"),
        (b'"stream": "maybe"', "stream"),
        (b'"stream": 1, "model": 3', "model"),
        (b'"stream": 1, "bootstrap_host": "null"', "bootstrap_host"),
        (b'"n": "1", "kv_transfer_params": {"prompt_token_ids": [1], "remote_host": "null"}', "kv_transfer_params"),
    ],
)
def test_what_is_bounded_stays_so_however_it_is_written(fields: bytes, param: str) -> None:
    assert refusal("completions", b'{"prompt": "a", %s}' % fields)["param"] == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": "hi"',
        b'{"prompt": "hi"} x',
        b"{'prompt': 'hi'}",
        b'{"prompt": "h\x01"}',
        b'{"prompt": "a\xff"}',
        b'{"prompt": "a", "model": "\xff"}',
        b'{"prompt": "a", "other": "\xff"}',
        b'{"prompt": "a", "\xff": 1}',
        b'{"prompt": "\\q"}',
        b'{"prompt": "a", "n": 01}',
        b'{"prompt": "a", "x": ' + DEEP + b"}",
        b'{"prompt": ' + DEEP + b"}",
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda raw: repr(raw[:32]),
)
def test_what_is_no_json_is_told_so(raw: bytes) -> None:
    error = refusal("completions", raw)
    assert error["code"] == "invalid_json"


def test_a_refusal_never_quotes_the_body() -> None:
    secret = b"swordfish"
    for raw in (
        b'{"prompt": "%s' % secret,
        b'{"prompt": "%s", "model": ["%s"]}' % (secret, secret),
        b'{"prompt": "%s\xff"}' % secret,
        b'{"prompt": {"%s": 1}}' % secret,
        b"%s" % secret,
    ):
        assert "swordfish" not in str(refusal("completions", raw))


@repeatable
@given(st.binary(max_size=60) | st.text(max_size=40).map(lambda text: b'{"prompt": "' + text.encode() + b'"}'))
def test_any_bytes_are_an_inference_or_a_400(raw: bytes) -> None:
    try:
        found = parse_inference("completions", raw)
        assert not {"prompt", "prompt_embeds"}.isdisjoint(found.fields())
        assert not names_adapter(raw)
    except BadRequest as error:
        assert error.response.status == 400  # noqa: PT017 -- either is right


@pytest.mark.parametrize(
    ("raw", "model"),
    [
        (b'{"model": "m", "input": [1]}', "m"),
        (b'{"input": 1}', None),
        (b'{"model": "", "input": 1}', None),
        (b'[{"model": "m"}]', None),
        (b'{"model":"m","n":128,"kv_transfer_params":{"prompt_token_ids":[1]},"bootstrap_host":null}', "m"),
        (b'{"model":"m","vllm_xargs":{"session_id":"s","a":[1,2.5]}}', "m"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_the_model_of_any_other_request(raw: bytes, model: str | None) -> None:
    assert read_passed_on(raw, may_be_other=False).model == read_passed_on(raw, may_be_other=True).model == model


@pytest.mark.parametrize(
    "raw",
    [
        b"--boundary\r\n",
        b"",
        b'{"model": "\xff"}',
        b'{"x": ' + DEEP + b', "model": "m"}',
        b'{"model": "m", "x": NaN}',
        b'\xef\xbb\xbf{"model": "m"}',
        '{"model": "m"}'.encode("utf-16"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_json_is_passed_over_only_where_it_may_be_something_else(raw: bytes) -> None:
    assert read_passed_on(raw, may_be_other=True).model is None
    with pytest.raises(BadRequest):
        read_passed_on(raw, may_be_other=False)


def test_what_is_passed_on_is_looked_through_once() -> None:
    """A long prompt takes longer to look through than all else that is done for it."""
    raw = b'{"model": "", "stream": true, "input": [{}], "store": false, "previous_response_id": "resp_1"}'
    said, silent = read_passed_on(raw, may_be_other=False), read_passed_on(b"[]", may_be_other=False)
    assert (said.model, bytes(said.stream), bytes(said.store)) == (None, b"true", b"false")
    post = RequestHead(b"POST", PATH, PATH, [], True, False, b"", None, None)
    others = post._replace(method=b"GET"), post._replace(path=b"/v1/embeddings")
    assert [asks_for_stream(head, said) for head in (post, *others)] == [True, False, False]
    assert not asks_for_stream(post, silent)
    assert [read_kept(post, said), read_kept(post, silent)] == [Kept("resp_1", False), Kept(None, True)]


STEERING = [
    b'"kv_transfer_params":{"remote_host":"10.0.0.1","remote_port":22}',
    b'"kv_transfer_params":{"prompt_token_ids":[1],"do_remote_prefill":true}',
    b'"kv_transfer_params":[1]',
    b'"kv\\u005ftransfer_params":{"remote_host":"10.0.0.1"}',
    b'"kv_transfer_params":null,"kv_transfer_params":{"remote_host":"10.0.0.1"}',
    b'"vllm_xargs":{"session_id":"s","kv_cache_report_mode":"full"}',
    b'"vllm_xargs":{"kv_transfer_params":"x"}',
    b'"vllm_xargs":{"ec_transfer_params":[1]}',
    b'"ec_transfer_params":{"hash":{"peer_host":"10.0.0.1"}}',
    b'"bootstrap_host":"10.0.0.1"',
    b'"bootstrap_host":["10.0.0.1"]',
    b'"bootstrap_port":22',
    b'"bootstrap_room":1',
    b'"data_parallel_rank":1',
    b'"routed_dp_rank":0',
    b'"disagg_prefill_dp_rank":0',
    b'"http_worker_ipc":"ipc:///tmp/x"',
    b'"lora_id":"1"',
    b'"positional_embed_overrides":{"embeds":[],"positions":[]}',
    b'"token_indices_to_pool":[1099511627776]',
    b'"multi_item_delimiter_indices":[9]',
]


@pytest.mark.parametrize(
    ("fields", "recomputed"),
    [
        (b'"logprobs":1', False),
        (b'"prompt_logprobs":null,"echo":false', False),
        (b'"prompt_logprobs":0', True),
        (b'"echo":true', True),
    ],
)
def test_whether_its_prompt_may_be_computed_again(fields: bytes, recomputed: bool) -> None:
    body = b'{"prompt":"x","messages":[],%s}' % fields
    assert [parse_inference(endpoint, body).recomputed for endpoint in ENDPOINTS.values()] == [recomputed] * 2


@pytest.mark.parametrize(
    ("fields", "uncached"),
    [
        (b'"logprobs":1', [False, False]),
        (b'"prompt_logprobs":0', [True, True]),
        (b'"echo":true', [False, True]),  # vLLM's chats take it for top_logprobs, of which there are 0
        (b'"echo":true,"logprobs":null', [False, True]),
        (b'"echo":true,"logprobs":1', [True, True]),
        (b'"echo":false,"logprobs":1', [False, False]),
    ],
)
def test_whether_its_prompt_is_surely_computed_again(fields: bytes, uncached: list[bool]) -> None:
    body = b'{"prompt":"x","messages":[],%s}' % fields
    assert [parse_inference(endpoint, body).uncached for endpoint in ENDPOINTS.values()] == uncached


@pytest.mark.parametrize("fields", STEERING, ids=bytes.decode)
def test_what_steers_engines_is_not_for_clients(fields: bytes) -> None:
    """Whom to fetch KV from, and which of its ranks serves."""
    body = b'{"model":"m","prompt":"SECRET","messages":[],%s}' % fields
    tries: list[Callable[[], object]] = [
        lambda: parse_inference("completions", body),
        lambda: parse_inference("chat", body),
        lambda: read_passed_on(body, may_be_other=True),
    ]
    for attempt in tries:
        with pytest.raises(BadRequest, match="steers engines") as caught:
            attempt()
        assert caught.value.response.status == 400


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_how_many_answers_a_prompt_may_have(name: str) -> None:
    assert parse_inference("chat", b'{"messages":[],"%s":128}' % name.encode()).choices == 128
    for wrong in (b"129", b"99999999999999999999", b'"x"', b"[1]"):
        with pytest.raises(BadRequest) as caught:
            parse_inference("chat", b'{"messages":[],"%s":%s}' % (name.encode(), wrong))
        assert caught.value.response.body.count(b'"param":"%s"' % name.encode()) == 1


@pytest.mark.parametrize("one", [b'"a"', b"[1]", b' ["a"] '])
def test_how_many_prompts_a_request_may_hold(one: bytes) -> None:
    parse_inference("completions", b'{"prompt":[%s]}' % b",".join([one] * MOST_PROMPTS))
    with pytest.raises(BadRequest, match="2048 prompts"):
        parse_inference("completions", b'{"prompt":[%s]}' % b",".join([one] * (MOST_PROMPTS + 1)))


def test_nor_may_the_ids_of_a_chat_be_more() -> None:
    """One of them is looked at; all would be checked."""
    chat = b'{"messages":[],"input_ids":[%s]}'
    parse_inference("chat", chat % b",".join([b"[1]"] * MOST_PROMPTS))
    with pytest.raises(BadRequest, match="2048 prompts"):
        parse_inference("chat", chat % b",".join([b"[1]"] * (MOST_PROMPTS + 1)))


def test_a_prompt_of_ids_is_one_however_many_they_are() -> None:
    parse_inference("completions", b'{"prompt":[%s]}' % b",".join([b"1"] * (MOST_PROMPTS + 1)))
