"""Both halves of a request as each connector wants them, byte for byte; and what real engines sent and answered."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.disaggregation import CONNECTORS, Handover, Prefiller
from engines.disaggregation.answer import Prefilled, coordinates, read_answer
from engines.disaggregation.legs import (
    answer_limit,
    answers_wanted,
    count_of,
    prompts_in,
    raw,
    read_body,
    value_of,
    write_body,
)
from engines.disaggregation.mooncake import bootstrap_url, own_engines, read_bootstrap
from tests.engines.recordings import exchanges

NUMBER = 0x0123456789ABCDEF
P = Prefiller("10.0.0.1", bootstrap_port=8998, engine_ids={0: "engine-0", 1: "engine-1"})
COORDINATES = {"remote_engine_id": "e", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 1}
PUSHING = P._replace(coordinates=COORDINATES)
RETURNED = b'{"remote_block_ids":[[1,2]],"big":123456789012345678901234567890,"far":1e400,"u":"\\u00e9",  "n":null}'
TO_PREFILL = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null%s}'
)
VERBATIM = b'"seed":123456789012345678901234567890,"top_p":1e400,"user":"\\u00e9\\/","x":{"b" : 1,"a":[ ]}'
TEXT = b'{"model":"m","prompt":"hi",%s,%s}'
CHAT = b'{"model":"m","messages":[{"role":"user","content":"\\ud83d\\ude00 hi"}],%s,%s}'


def split(
    name: str, body: bytes, prefiller: Prefiller = P, returned: bytes | None = RETURNED, number: int = NUMBER
) -> tuple[bytes, bytes]:
    """Both bodies."""
    connector, fields, handover = CONNECTORS[name], read_body(body), Handover(prefiller, number)
    before = dict(fields)
    answered = None if returned is None or connector.together(prefiller) else msgspec.Raw(returned)
    legs = connector.prefill(fields, handover), connector.decode(fields, handover, answered)
    assert fields == before, "none is changed in place"
    return write_body(legs[0]), write_body(legs[1])


ONE = b'"max_tokens":1,"stream":false'
BOOT = b'"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":81985529216486895'
ROOM = 81985529216486895
MOON_P = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-0123456789abcdef"%s}'
MOON_D = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_bootstrap_addr":"http://10.0.0.1:8998",'
    b'"remote_engine_id":"engine-0","transfer_id":"xfer-0123456789abcdef"%s}'
)
PUSH_D = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e","remote_host":"10.0.0.1",'
    b'"remote_port":5600,"tp_size":1,"remote_request_id":"xfer-0123456789abcdef"%s}'
)
WITH_TO_PREFILL = b'%s,"ignore_eos":true,"kv_transfer_params":' + TO_PREFILL % b""
STOPS = b'"stop":["a"],"stop_token_ids":[1]'


@pytest.mark.parametrize("whole", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("connector", "prefiller", "to_prefill", "to_decode"),
    [
        ("nixl", P, WITH_TO_PREFILL, b',"kv_transfer_params":' + RETURNED),
        ("nixl-push", P, WITH_TO_PREFILL, b',"kv_transfer_params":' + RETURNED),
        (
            "nixl-push",
            PUSHING,
            WITH_TO_PREFILL,
            b',"kv_transfer_params":' + PUSH_D % b"",
        ),
        (
            "mooncake",
            P,
            b'%s,"ignore_eos":true,"kv_transfer_params":' + MOON_P % b"",
            b',"kv_transfer_params":' + MOON_D % b"",
        ),
        ("store", P, b"%s", b""),
    ],
)
def test_both_halves_for_vllm(
    connector: str, prefiller: Prefiller, to_prefill: bytes, to_decode: bytes, whole: bytes
) -> None:
    """The first is for one token in one piece; the second is as the client wrote it. `%s` stands where both differ."""
    asked = b'"max_tokens":64,"stream":true,"stream_options":{"include_usage":true},"min_tokens":4,"n":1,"best_of":1'
    first, second = split(connector, whole % (VERBATIM, asked), prefiller)
    assert first == whole % (VERBATIM, to_prefill % ONE)
    assert second == whole % (VERBATIM, asked + to_decode)


@pytest.mark.parametrize("whole", [TEXT, CHAT])
def test_both_halves_for_sglang(whole: bytes) -> None:
    asked = b'"max_tokens":64,"stream":true,"stream_options":{"include_usage":true},"min_tokens":4,"n":1,' + STOPS
    first, second = split("sglang", whole % (VERBATIM, asked))
    kept = asked.replace(b'"stream_options":{"include_usage":true},', b"").replace(b"true", b"false")
    assert first == whole % (VERBATIM, kept + b"," + BOOT)
    assert second == whole % (VERBATIM, asked + b"," + BOOT)


@pytest.mark.parametrize(
    ("given", "prefill"),
    [
        (b'"max_completion_tokens":64', b'"max_completion_tokens":1,' + ONE),
        (b'"max_completion_tokens":null', b'"max_completion_tokens":1,' + ONE),
        (b'"max_tokens":9,"max_completion_tokens":64', b'"max_tokens":1,"max_completion_tokens":1,"stream":false'),
        (b'"temperature":0', b'"temperature":0,' + ONE),
    ],
)
@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake", "store"])
def test_one_token_however_the_length_is_said(connector: str, given: bytes, prefill: bytes) -> None:
    first, second = split(connector, b'{"prompt":"x",%s}' % given)
    assert first.startswith(b'{"prompt":"x",' + prefill)
    assert second.startswith(b'{"prompt":"x",' + given)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (b'"max_tokens":0', b'"max_tokens":0,"stream":false'),
        (b'"max_tokens":-1.0', b'"max_tokens":-1.0,"stream":false'),
        (b'"max_completion_tokens":0', b'"max_completion_tokens":0,"max_tokens":1,"stream":false'),
        (b'"max_tokens":0,"max_completion_tokens":9', b'"max_tokens":0,"max_completion_tokens":1,"stream":false'),
        (b'"max_tokens":5,"stream":false,"min_tokens":6', b'"max_tokens":5,"stream":false,"min_tokens":6'),
        (b'"max_tokens":5,"stream":false,"min_tokens":5', b'"max_tokens":1,"stream":false'),
        (b'"min_tokens":6', b'"max_tokens":1,"stream":false'),
        (b'"stream_options":{"a":1}', b'"max_tokens":1,"stream":false,"stream_options":{"a":1}'),
        (b'"max_tokens":5,"stream":false,"stream_options":{}', b'"max_tokens":1,"stream":false,"stream_options":{}'),
    ],
)
@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake", "store"])
def test_what_vllm_refuses_is_refused_before_the_prompt_is_computed(connector: str, asked: bytes, kept: bytes) -> None:
    first, second = split(connector, b'{"prompt":"x",%s}' % asked)
    assert first.startswith(b'{"prompt":"x",' + kept)
    assert second.startswith(b'{"prompt":"x",' + asked)


NAMED = b'{"type":"function","function":{"name":"f"}}'


@pytest.mark.parametrize(
    ("version", "choice", "sent"),
    [
        ("0.17.1", b'"required"', b"null"),
        ("0.20.2", NAMED, b"null"),
        ("0.17.1", b'"auto"', b'"auto"'),
        ("0.17.1", b'"none"', b'"none"'),
        ("0.21.0", NAMED, NAMED),
        (None, b'"required"', b'"required"'),
    ],
)
@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake", "store"])
def test_no_call_is_read_out_of_one_token(connector: str, version: str | None, choice: bytes, sent: bytes) -> None:
    """Before 0.21 vLLM may answer 400 or 500 where the call that must be there is not whole."""
    body = b'{"messages":[],"tools":[],"tool_choice":%s}' % choice
    first, second = split(connector, body, P._replace(version=version))
    assert b'"tools":[],"tool_choice":' + sent + b"," in first
    assert b'"tool_choice":' + choice in second


@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake"])
def test_a_prefill_never_stops_early(connector: str) -> None:
    """It would not hand over its KV: with MooncakeConnector, and before vLLM 0.21 with NixlConnector."""
    first, second = split(connector, b'{"prompt":"x",%s,"ignore_eos":false}' % STOPS)
    sent = json.loads(first)
    assert sent["ignore_eos"] is True
    assert sent.keys().isdisjoint({"stop", "stop_token_ids"})
    assert b'%s,"ignore_eos":false' % STOPS in second


@pytest.mark.parametrize("ids", [b"[1, 2,3]", b"[123456789012345678901234567890]", b"[1e400]", b'"x"'])
def test_of_the_clients_own_parameters_the_prompts_tokens_stay(ids: bytes) -> None:
    body = b'{"messages":[],"kv_transfer_params":{"do_remote_decode":true,"prompt_token_ids":%s,"mine":1}}' % ids
    added = b',"prompt_token_ids":' + ids
    expected = {
        "nixl": (TO_PREFILL % added, RETURNED.replace(b",  ", b",")[:-1] + added + b"}"),
        "mooncake": (MOON_P % added, MOON_D % added),
        "nixl-push": (TO_PREFILL % added, PUSH_D % added),
    }
    for connector, params in expected.items():
        sent = split(connector, body, PUSHING)
        for leg, wanted in zip(sent, params, strict=True):
            assert b'"kv_transfer_params":' + wanted in leg


@pytest.mark.parametrize(
    "given", [b"null", b"{}", b"[]", b"7", b'{"prompt_token_ids":null}', b'{"a":1e400}', b'{"\xff":1}']
)
@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake"])
def test_other_parameters_of_the_client_are_replaced(connector: str, given: bytes) -> None:
    first, second = split(connector, b'{"prompt":"x","kv_transfer_params":%s}' % given)
    plain = split(connector, b'{"prompt":"x","kv_transfer_params":{}}')
    assert (first, second) == plain


@pytest.mark.parametrize("connector", ["nixl", "nixl-push"])
def test_a_decode_that_pulls_needs_the_prefills_answer(connector: str) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params"):
        split(connector, b'{"prompt":"x"}', returned=None)


@pytest.mark.parametrize(
    ("body", "prompts", "answers"),
    [
        (b'{"prompt":"x"}', 1, 1),
        (b'{"prompt":["x"]}', 1, 1),
        (b'{"prompt":[ "x", "y"]}', 2, 1),
        (b'{"prompt":[1,2,3]}', 1, 1),
        (b'{"prompt":[]}', 1, 1),
        (b'{"prompt":[ [1,2],\n[3]]}', 2, 1),
        (b'{"prompt":[1e400, 2]}', 1, 1),
        (b'{"prompt":["\xff", "[", "]"]}', 3, 1),
        (b'{"messages":[{},{}]}', 1, 1),
        (b'{"prompt":"x","n":2}', 1, 2),
        (b'{"messages":[],"n":2}', 1, 2),
        (b'{"prompt":"x","n":1,"best_of":3}', 1, 3),
        (b'{"prompt":"x","n":null,"best_of":null}', 1, 1),
        (b'{"prompt":"x","n":2.0}', 1, 2),
        (b'{"prompt":"x","n":"3"}', 1, 3),
        (b'{"messages":[],"n":1.0,"best_of":"2"}', 1, 2),
        (b'{"prompt":"x","n":"many"}', 1, 1),
        (b'{"prompt":"x","n":1e400}', 1, 1),
        (b'{"prompt":["x","y"],"n":2}', 2, 2),
    ],
)
def test_what_can_be_split(body: bytes, prompts: int, answers: int) -> None:
    fields = read_body(body)
    assert (prompts_in(fields), answers_wanted(fields)) == (prompts, answers)
    for name, connector in CONNECTORS.items():
        why = connector.refuses(fields)
        if name == "store":
            assert why is None
        elif name == "sglang":  # which passes over best_of
            assert (why is not None) == (answers > 1 and b"best_of" not in body)
        else:
            assert (why is not None) == (prompts > 1 or answers > 1)


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        (b'"max_tokens":9', 9),
        (b'"max_tokens":9.0', 9),
        (b'"max_tokens":"9"', 9),
        (b'"messages":[],"max_tokens":9,"max_completion_tokens":null', 9),
        (b'"messages":[],"max_tokens":9,"max_completion_tokens":8.0', 8),
        (b'"prompt":"x","max_tokens":9,"max_completion_tokens":80', 9),
        (b'"max_tokens":9.5', None),
        (b'"max_tokens":[9]', None),
    ],
)
def test_the_most_tokens_however_they_are_written(asked: bytes, limit: int | None) -> None:
    assert answer_limit(read_body(b"{%s}" % asked)) == limit


def test_fields_may_be_nested_deeper_than_anybody_can_read() -> None:
    """How deep that is depends on the stack: a body that could be read may hold a field that cannot, further down."""
    deep = b"[" * 10_000 + b"]" * 10_000
    with pytest.raises(ValueError, match="too deeply"):
        read_body(b'{"stop":%b}' % deep)
    body = {"stop": msgspec.Raw(deep), "n": msgspec.Raw(deep), "prompt": msgspec.Raw(deep)}
    assert (value_of(body, "stop"), count_of(body, "n"), prompts_in(body)) == (None, None, 1)


@pytest.mark.parametrize(
    ("asked", "several"),
    [
        (b'"prompt_embeds":"x"', False),
        (b'"prompt":null,"prompt_embeds":["x"]', False),
        (b'"prompt":"x","prompt_embeds":null', False),
        (b'"prompt":"x","prompt_embeds":"y"', True),
        (b'"prompt_embeds":["x","y"]', True),
    ],
)
@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake"])
def test_embeddings_are_prompts_too(connector: str, asked: bytes, several: bool) -> None:
    """Of those beside a prompt vLLM makes answers too."""
    why = CONNECTORS[connector].refuses(read_body(b"{%b}" % asked))
    assert ("several prompts" in why) if why else not several


@pytest.mark.parametrize("connector", CONNECTORS)
def test_beams_are_several_sequences(connector: str) -> None:
    """vLLM asks itself for each step of each beam, without the parameters of the transfer."""
    why = CONNECTORS[connector].refuses(read_body(b'{"prompt":"x","use_beam_search":true}'))
    assert ("beam search" in why) if why else connector in {"store", "sglang"}
    assert CONNECTORS[connector].refuses(read_body(b'{"prompt":"x","use_beam_search":false}')) is None


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (b'"prompt":"x","prompt_logprobs":0', True),
        (b'"messages":[],"prompt_logprobs":5', True),
        (b'"prompt":"x","echo":true,"logprobs":0', True),
        (b'"messages":[],"echo":true', True),
        (b'"prompt":"x","prompt_logprobs":null,"logprobs":5', False),
        (b'"prompt":"x","echo":true,"logprobs":null', False),
        (b'"prompt":"x","echo":false,"logprobs":5', False),
        (b'"messages":[],"echo":false,"logprobs":true,"top_logprobs":5', False),
    ],
)
@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_probabilities_of_a_prompt_are_known_where_it_is_computed(
    connector: str, asked: bytes, wanted: bool
) -> None:
    why = CONNECTORS[connector].refuses(read_body(b"{%s}" % asked))
    assert ("log probabilities of its prompt" in why) if why else not wanted


@pytest.mark.parametrize(
    ("kept", "differs"), [(b"-1", True), (b'"-1"', True), (b"-1.0", True), (b"100", False), (b"null", False)]
)
@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_prompt_that_is_cut_to_what_its_answer_leaves_room_for(connector: str, kept: bytes, differs: bool) -> None:
    """The parts make answers of other lengths. SGLang has no such field."""
    why = CONNECTORS[connector].refuses(read_body(b'{"prompt":"x","truncate_prompt_tokens":%s}' % kept))
    assert ("is cut" in why) if why else (not differs or connector == "sglang")


@pytest.mark.parametrize(("room", "fits"), [(None, True), (9, True), (8, False), (-1, False)])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_prompt_that_leaves_no_room_for_its_answer(connector: str, room: int | None, fits: bool) -> None:
    """Only who decodes would say so. SGLang is asked for as much in both parts."""
    why = CONNECTORS[connector].refuses(read_body(b'{"prompt":"x","max_tokens":9}'), room)
    assert ("it asks for 9 tokens" in why) if why else (fits or connector == "sglang")
    assert CONNECTORS[connector].refuses(read_body(b'{"prompt":"x"}'), room) is None


def test_a_batch_for_sglang_has_a_room_for_each_prompt() -> None:
    first, second = (json.loads(leg) for leg in split("sglang", b'{"prompt":["a","b","c"]}'))
    for leg in (first, second):
        assert leg["bootstrap_host"] == ["10.0.0.1"] * 3
        assert leg["bootstrap_port"] == [8998] * 3
        assert leg["bootstrap_room"] == [ROOM, ROOM + 1, ROOM + 2]
    one = [json.loads(leg)["bootstrap_room"] for leg in split("sglang", b'{"prompt":["a"]}')]
    assert one == [ROOM, ROOM]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [(b'"text":"a"', 1), (b'"text":["a","b"]', 2), (b'"input_ids":[1,2,3]', 1), (b'"input_ids":[[1],[2],[3]]', 3)],
)
def test_sglangs_own_requests_are_split_like_others(prompt: bytes, prompts: int) -> None:
    asked = b'{%s,"sampling_params":{"max_new_tokens":8},"stream":true}' % prompt
    first, second = (json.loads(leg) for leg in split("sglang", asked))
    for leg in (first, second):
        assert leg["bootstrap_room"] == (ROOM if prompts == 1 else [ROOM + number for number in range(prompts)])
        assert leg["sampling_params"] == {"max_new_tokens": 8}
    assert (first["stream"], second["stream"]) == (False, True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (b'"sampling_params":{"n":2}', "several answers"),
        (b'"sampling_params":[{"n":1},{"n":2}]', "several answers"),
        (b'"sampling_params":{"n":1,"beam_width":2}', "beams"),
        (b'"sampling_params":{"n":1.0}', None),
        (b'"sampling_params":{"n":null}', None),
        (b'"sampling_params":null', None),
        (b'"return_logprob":true', None),
        (b'"return_logprob":true,"logprob_start_len":-1', None),
        (b'"return_logprob":true,"logprob_start_len":0', "log probabilities of its prompt"),
        (b'"return_logprob":[true,true],"logprob_start_len":[-1,0]', "log probabilities of its prompt"),
        (b'"return_logprob":false,"logprob_start_len":0', None),
    ],
)
def test_which_of_sglangs_own_requests_cannot_be_split(fields: bytes, words: str | None) -> None:
    why = CONNECTORS["sglang"].refuses(read_body(b'{"text":"x",%s}' % fields))
    assert (words in why) if why and words else (why, words) == (None, None)


def test_sglang_is_told_an_ipv6_address_as_in_a_url() -> None:
    for leg in split("sglang", b'{"prompt":"x"}', P._replace(host="fd00::1")):
        assert json.loads(leg)["bootstrap_host"] == "[fd00::1]"


@given(st.integers(0, 2**63 - 1), st.integers(1, 64), st.data(), st.integers(1, 5))
def test_a_room_tells_the_prefill_rank(number: int, size: int, data: st.DataObject, prompts: int) -> None:
    rank = data.draw(st.integers(0, size - 1))
    prefiller = P._replace(dp_rank=rank, dp_size=size)
    body = json.dumps({"prompt": ["x"] * prompts}).encode()
    first, second = (json.loads(leg) for leg in split("sglang", body, prefiller, number=number))
    rooms = first["bootstrap_room"] if prompts > 1 else [first["bootstrap_room"]]
    assert first["bootstrap_room"] == second["bootstrap_room"]
    assert all(0 <= room < 2**63 and room % size == rank for room in rooms)
    assert len(set(rooms)) == prompts
    assert second.get("disagg_prefill_dp_rank") == (rank if size > 1 else None)
    assert "disagg_prefill_dp_rank" not in first


def test_mooncakes_engine_is_that_of_the_rank() -> None:
    connector = CONNECTORS["mooncake"]
    assert connector.lacks(P) is None
    assert "rank 2" in str(connector.lacks(P._replace(dp_rank=2)))
    _, second = split("mooncake", b'{"prompt":"x"}', P._replace(dp_rank=1, dp_size=2))
    assert json.loads(second)["kv_transfer_params"]["remote_engine_id"] == "engine-1"


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("p", None, "http://p:8998"),
        ("10.0.0.1", 9000, "http://10.0.0.1:9000"),
        ("::1", 9000, "http://[::1]:9000"),
    ],
)
def test_where_a_bootstrap_server_is(host: str, port: int | None, url: str) -> None:
    assert bootstrap_url(Prefiller(host, bootstrap_port=port)) == url


@pytest.mark.parametrize(
    ("told", "first_rank", "size", "own"),
    [
        ({0: "a", 1: "b"}, 0, 2, {0: "a", 1: "b"}),
        ({1: "b"}, 0, 2, {1: "b"}),
        ({3: "d"}, 0, 1, {0: "d"}),
        ({2: "c", 3: "d"}, 2, 2, {0: "c", 1: "d"}),
        ({0: "a", 1: "b", 2: "c", 3: "d"}, 2, 2, {0: "c", 1: "d"}),
        ({}, 2, 2, {}),
    ],
)
def test_engine_ids_of_a_servers_own_ranks(
    told: dict[int, str], first_rank: int, size: int, own: dict[int, str]
) -> None:
    """Of several servers of one data-parallel engine each has a bootstrap server, or all have one."""
    assert own_engines(told, first_rank, size) == own


# -- real engines


def legs_of(recording: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The exchanges of a request's two halves, as a prefill and a decode worker of vLLM had them."""
    found = exchanges(recording)
    firsts = {each["step"].removesuffix(": prefill"): each for each in found if each["step"].endswith(": prefill")}
    seconds = {each["step"].removesuffix(": decode"): each for each in found if each["step"].endswith(": decode")}
    return [(firsts[step], seconds[step]) for step in seconds if step in firsts]


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_real_pairs_were_asked_the_same(connector: str) -> None:
    """From what a decode worker was asked, without its parameters, both halves follow as they were recorded."""
    pairs = legs_of(f"vllm-0.32.0-pd-{connector}")
    assert len(pairs) >= 8
    compared = 0
    for first, second in pairs:
        asked = {name: value for name, value in second["request"]["body"].items() if name != "kv_transfer_params"}
        body = read_body(json.dumps(asked).encode())
        if CONNECTORS[connector].refuses(body):
            continue
        params = second["request"]["body"]["kv_transfer_params"]
        engine = params["remote_engine_id"]
        port = int(params.get("remote_bootstrap_addr", "http://x:1").rpartition(":")[2])
        answered = read_answer(json.dumps(first["response"]["body"]).encode())
        usage = first["response"]["body"]["usage"]["prompt_tokens_details"]
        assert answered.cached_tokens == usage["cached_tokens"]
        handover = Handover(Prefiller("127.0.0.1", bootstrap_port=port, engine_ids={0: engine}), NUMBER)
        sent = CONNECTORS[connector].prefill(body, handover)
        wanted = {name: value for name, value in first["request"]["body"].items() if value != []}
        told = json.loads(write_body(sent))
        for each in (told, wanted):
            each["kv_transfer_params"].pop("transfer_id", None)
            assert each.pop("n", 1) == 1
            each["ignore_eos"] = True  # the recording's requests say so themselves, but for some
            for name in ("stop", "stop_token_ids"):
                each.pop(name, None)
        assert told == wanted, first["step"]
        decoded = json.loads(write_body(CONNECTORS[connector].decode(body, handover, answered.params)))
        if "transfer_id" in params:
            decoded["kv_transfer_params"]["transfer_id"] = params["transfer_id"]
        assert decoded == second["request"]["body"], second["step"]
        compared += 1
    assert compared >= 6


def test_a_real_bootstrap_server() -> None:
    found = exchanges("vllm-0.32.0-pd-mooncake")
    asked = [each for each in found if each["request"]["path"] == "/query"]
    assert asked
    engines = read_bootstrap(json.dumps(asked[0]["response"]["body"]).encode())
    used = {
        second["request"]["body"]["kv_transfer_params"]["remote_engine_id"]
        for _, second in legs_of("vllm-0.32.0-pd-mooncake")
    }
    assert {engines[0]} == used


# -- what nobody should answer

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KNOWN = [
    "usage",
    "prompt_tokens_details",
    "cached_tokens",
    "kv_transfer_params",
    "transfer_mode",
    "0",
    "1",
    "engine_id",
]
NAMES = st.text(max_size=4) | st.sampled_from(KNOWN)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4))
DOCUMENTS = JSON.map(lambda value: json.dumps(value).encode())
ANSWERS = st.dictionaries(NAMES, JSON, max_size=4).map(lambda value: json.dumps(value).encode())
DAMAGED = st.tuples(ANSWERS, st.integers(0, 200), st.binary(max_size=3)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + 1 :]
)
BODIES = st.binary(max_size=50) | DOCUMENTS | ANSWERS | DAMAGED
NASTY = [
    b"[" * 100_000,
    b'{"kv_transfer_params":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    b'{"kv_transfer_params":{"transfer_mode":"push","a":1e400}}',
    b'{"kv_transfer_params":{"\xff":1}}',
    b'{"%s":{"engine_id":"x"}}' % (b"1" * 5000),
    b'{"0":{"engine_id":"\xff"}}',
    b'{"\xff":{"engine_id":"x"}}',
    b"",
    b"\xef\xbb\xbf{}",
]


def look_at(body: bytes) -> None:
    """Nothing but a ValueError, or None, or {}."""
    engines = read_bootstrap(body)
    assert all(isinstance(rank, int) and isinstance(name, str) for rank, name in engines.items())
    try:
        answer = read_answer(body)
    except ValueError:
        return
    assert isinstance(answer, Prefilled)
    if answer.params is not None:
        known = coordinates(answer.params)
        assert known is None or isinstance(known, dict)


@given(BODIES)
def test_answers_that_are_none(body: bytes) -> None:
    look_at(body)


@pytest.mark.parametrize("body", NASTY, ids=range(len(NASTY)))
def test_nasty_answers(body: bytes) -> None:
    look_at(body)


@pytest.mark.parametrize(
    ("body", "params", "cached"),
    [
        (b'{"usage":{"prompt_tokens":9}}', None, None),
        (b'{"usage":null,"kv_transfer_params":null}', None, None),
        (b'{"usage":{"prompt_tokens_details":null}}', None, None),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}', None, None),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":0}},"kv_transfer_params": {"a" : 1} }', b'{"a" : 1}', 0),
        (b'{"kv_transfer_params":"x"}', None, None),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":-1}}}', None, None),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":1%s}}}' % (b"0" * 400), None, None),  # for no float
        (b'{"meta_info":{"cached_tokens":1%s}}' % (b"0" * 400), None, None),
    ],
)
def test_what_an_answer_tells(body: bytes, params: bytes | None, cached: int | None) -> None:
    answer = read_answer(body)
    assert (None if answer.params is None else bytes(answer.params), answer.cached_tokens) == (params, cached)


@pytest.mark.parametrize(
    ("body", "aborted"),
    [
        (b'{"choices":[{"finish_reason":"abort"}]}', True),
        (b'{"choices":[{"finish_reason":"length"},{"finish_reason":"abort"}]}', True),
        (b'{"choices":[{"finish_reason":"stop","text":"abort"}]}', False),
        (b'{"choices":[{"finish_reason":null},{}]}', False),
        (b'{"choices":null}', False),
        (b'{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Aborted"}}}', True),
        (b'{"text":"","meta_info":{"finish_reason":{"type":"length","length":1}}}', False),
        (b'{"text":"","meta_info":{"finish_reason":null}}', False),
        (b'{"text":"","meta_info":{"finish_reason":"stop"}}', False),
    ],
)
def test_a_prefill_that_was_aborted(body: bytes, aborted: bool) -> None:
    assert read_answer(body).aborted is aborted


@pytest.mark.parametrize(
    ("body", "cached"),
    [
        (b'{"text":"x","meta_info":{"prompt_tokens":9,"cached_tokens":8}}', 8),
        (b'{"text":"x","meta_info":{"prompt_tokens":9}}', None),
        (b'[{"text":"x","meta_info":{"cached_tokens":8}},{"text":"y"}]', None),
    ],
)
def test_what_sglangs_own_answer_tells(body: bytes, cached: int | None) -> None:
    assert read_answer(body) == Prefilled(None, cached)


def test_only_a_worker_that_pushes_tells_where_to_register() -> None:
    answered = {**COORDINATES, "dcp_size": None, "remote_block_ids": [[1]], "transfer_mode": "push"}
    assert coordinates(raw(answered)) == COORDINATES
    assert coordinates(raw({**answered, "transfer_mode": "pull"})) is None
    assert CONNECTORS["nixl-push"].together(PUSHING)
    assert not CONNECTORS["nixl-push"].together(P)
