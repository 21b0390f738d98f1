"""What is found out of a worker: from recorded answers, from answers that lack something, from nonsense."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engines.sglang.describe
import engines.vllm.describe
from engines import problems
from engines.description import MOST_RANKS, EngineDescription, EventSource, Model
from engines.endpoints import confined
from engines.probe import Answer, probe
from tests.engines.recordings import answers, drive

HOST = "10.0.0.7"
VLLM, SGLANG, SGLANG_OLD = (answers(name) for name in ("vllm-0.32.0", "sglang-0.5.23", "sglang-0.5.18"))
TINY = (Model("tiny", "MODEL", 1024),)


def describe(served: dict[str, Answer], host: str = HOST) -> EngineDescription:
    return drive(probe(host), served)[0]


def served_json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode())


def changed(served: dict[str, Answer], path: str, **changes: Any) -> dict[str, Answer]:
    """The answer at `path` with other fields; None takes one out."""
    fields = {**json.loads(served[path].body), **changes}
    return {**served, path: served_json({key: value for key, value in fields.items() if value is not None})}


def without(served: dict[str, Answer], *paths: str) -> dict[str, Answer]:
    return {path: answer for path, answer in served.items() if path not in paths}


def test_vllm_as_recorded() -> None:
    found, asked = drive(probe(HOST), VLLM)
    assert found == EngineDescription(
        kind="vllm",
        version="0.32.0",
        models=TINY,
        block_size=32,
        dp_size=1,
        event_sources=(EventSource(0, "tcp://10.0.0.7:18101", "tcp://10.0.0.7:18201", "kv@w0@tiny"),),
        total_blocks=64,
        kv_dtype="auto",
        tokenizer_path="MODEL",
    )
    assert asked == ["/v1/models", "/version", "/kv_event_sources", "/metrics"]


def test_type_of_the_cache_as_it_was_told() -> None:
    metrics = VLLM["/metrics"].body.replace(b'cache_dtype="auto"', b'cache_dtype="fp8"', 1)
    assert describe({**VLLM, "/metrics": Answer(200, metrics)}).kv_dtype == "fp8"
    assert describe(changed(SGLANG, "/server_info", kv_cache_dtype="fp8_e5m2")).kv_dtype == "fp8_e5m2"


@pytest.mark.parametrize(("served", "version"), [(SGLANG, "0.5.23"), (SGLANG_OLD, "0.5.18")])
def test_sglang_as_recorded(served: dict[str, Answer], version: str) -> None:
    found, asked = drive(probe(HOST), served)
    assert found == EngineDescription(
        kind="sglang",
        version=version,
        models=TINY,
        block_size=16,
        dp_size=1,
        event_sources=(EventSource(0, "tcp://10.0.0.7:18101", "tcp://10.0.0.7:18201", "kv@w0@tiny"),),
        total_blocks=128,
        max_running=4,
        tokenizer_path="MODEL",
    )
    assert asked == ["/v1/models", "/server_info", "/model_info"]


def test_sglangs_whole_server_info_names_the_tokenizer() -> None:
    found, asked = drive(probe(HOST), changed(SGLANG, "/server_info", tokenizer_path="elsewhere"))
    assert found.tokenizer_path == "elsewhere"
    assert "/model_info" not in asked


def test_sglang_tells_that_it_cuts_prompts() -> None:
    assert not describe(SGLANG).cuts_prompts
    assert describe(changed(SGLANG, "/server_info", allow_auto_truncate=True)).cuts_prompts


def test_engines_tell_that_they_keep_no_prefixes() -> None:
    """`--no-enable-prefix-caching` of vLLM, `--disable-radix-cache` of SGLang."""
    assert describe(VLLM).keeps_prefixes
    assert describe(SGLANG).keeps_prefixes
    metrics = VLLM["/metrics"].body.replace(b'enable_prefix_caching="True"', b'enable_prefix_caching="False"')
    assert not describe({**VLLM, "/metrics": Answer(200, metrics)}).keeps_prefixes
    assert not describe(changed(SGLANG, "/server_info", disable_radix_cache=True)).keeps_prefixes


def test_the_older_path_of_server_info() -> None:
    served = {**without(SGLANG, "/server_info"), "/get_server_info": SGLANG["/server_info"]}
    assert describe(served) == describe(SGLANG)


def test_lora_adapters_name_their_parent() -> None:
    adapter = {"id": "ad", "object": "model", "owned_by": "vllm", "root": "/adapters/ad", "parent": "tiny"}
    models = [adapter, *json.loads(VLLM["/v1/models"].body)["data"]]
    found = describe({**VLLM, "/v1/models": served_json({"data": models})})
    assert found.models == (Model("ad", "/adapters/ad", None, "tiny"), *TINY)
    assert found.tokenizer_path == "MODEL"


def test_sglangs_adapters_have_the_names_that_make_it_use_them() -> None:
    adapter = {"id": "ad", "object": "model", "owned_by": "sglang", "root": "/adapters/ad", "parent": "tiny"}
    models = [adapter, *json.loads(SGLANG["/v1/models"].body)["data"]]
    found = describe({**SGLANG, "/v1/models": served_json({"data": models})}).models
    assert {model.id: model.adapter for model in found} == {"tiny:ad": "ad", "tiny": None}
    assert found[0] == Model("tiny:ad", "/adapters/ad", None, "tiny")


def test_vllms_ranks_state_their_own_endpoints() -> None:
    config = json.loads(VLLM["/kv_event_sources"].body)["0"]
    metrics = VLLM["/metrics"].body.replace(b'engine="0"', b'engine="9"')  # of a server that has but these two
    ranks = {
        "10": {**config, "endpoint": "tcp://*:5567", "replay_endpoint": "tcp://0.0.0.0:6567"},
        "9": {**config, "endpoint": "tcp://10.1.2.3:5566", "replay_endpoint": None},
    }
    found = describe({**VLLM, "/kv_event_sources": served_json(ranks), "/metrics": Answer(200, metrics)})
    assert found.event_sources == (
        EventSource(0, "tcp://10.1.2.3:5566", None, "kv@w0@tiny"),
        EventSource(1, "tcp://10.0.0.7:5567", "tcp://10.0.0.7:6567", "kv@w0@tiny"),
    )
    assert (found.dp_size, found.first_rank) == (2, 9)
    assert found.asked_from == 0
    assert found.problems == (problems.NO_REPLAY,)


@pytest.mark.parametrize("ranks", [range(5000), range(7, 5007)])
def test_an_engine_of_absurdly_many_ranks_has_some(ranks: range) -> None:
    config = json.loads(VLLM["/kv_event_sources"].body)["0"]
    lines = [f'vllm:cache_config_info{{block_size="16",engine="{rank}"}} 1' for rank in ranks]
    sources = served_json({str(rank): config for rank in ranks})
    found = describe({**VLLM, "/kv_event_sources": sources, "/metrics": Answer(200, "\n".join(lines).encode())})
    assert (found.dp_size, len(found.event_sources)) == (MOST_RANKS, MOST_RANKS)


def test_vllms_ranks_count_without_events_too() -> None:
    """Of the blocks each rank states the sum (vLLM 0.33: v1/engine/core_client.py)."""
    lines = [f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="17"}} 1' for rank in (0, 1)]
    found = describe({**VLLM, "/metrics": Answer(200, "\n".join(lines).encode())})
    assert (found.dp_size, found.first_rank, found.block_size, found.total_blocks) == (2, 0, 16, 8)


def test_vllms_front_end_in_rust_tells_its_ranks_by_their_load() -> None:
    """It has neither /kv_event_sources nor the metric of the cache (rust/src/metrics/src/scheduler.rs)."""
    lines = [f'vllm:num_requests_running{{model_name="tiny",engine="{rank}"}} 0' for rank in (4, 5)]
    versions = served_json({"version": "0.33.0", "rust_frontend_version": "0.1.0"})
    served = {**without(VLLM, "/kv_event_sources"), "/version": versions}
    found = describe({**served, "/metrics": Answer(200, "\n".join(lines).encode())})
    assert (found.dp_size, found.first_rank, found.asked_from, found.block_size) == (2, 4, 4, None)


@pytest.mark.parametrize("served", [SGLANG, SGLANG_OLD])
def test_sglangs_ranks_count_ports_up(served: dict[str, Answer]) -> None:
    events = {**json.loads(served["/server_info"].body)["kv_events"], "dp_size": 3}
    found = describe(changed(served, "/server_info", kv_events=events, dp_size=3))
    assert found.dp_size == 3
    assert [(source.dp_rank, source.endpoint, source.replay) for source in found.event_sources] == [
        (rank, f"tcp://10.0.0.7:{18101 + rank}", f"tcp://10.0.0.7:{18201 + rank}") for rank in range(3)
    ]


def test_sglang_without_the_structured_description_has_its_launch_flag() -> None:
    served = changed(SGLANG_OLD, "/server_info", kv_events=None, dp_size=2)
    sources = describe(served).event_sources
    assert [source.endpoint for source in sources] == ["tcp://10.0.0.7:18101", "tcp://10.0.0.7:18102"]
    assert [source.replay for source in sources] == ["tcp://10.0.0.7:18201", "tcp://10.0.0.7:18202"]
    assert {source.topic for source in sources} == {"kv@w0@tiny"}


@pytest.mark.parametrize(("states", "together", "expected"), [([], 8, 4), ([], None, None), ([{}], 1, 1)])
def test_sglangs_running_limit_without_its_states(
    states: list[Any], together: int | None, expected: int | None
) -> None:
    served = changed(
        SGLANG, "/server_info", internal_states=states, max_running_requests=together, kv_events=None, dp_size=2
    )
    assert describe(served).max_running == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [({}, None), ({"enable_lora": True}, 8), ({"lora_paths": ["x=/x"]}, 8), ({"enable_lora": False}, None)],
)
def test_sglangs_limit_of_adapters_counts_where_it_has_any(told: dict[str, Any], expected: int | None) -> None:
    assert describe(changed(SGLANG, "/server_info", max_loras_per_batch=8, **told)).max_loras == expected


def vllm_events(**changes: Any) -> dict[str, Answer]:
    config = {**json.loads(VLLM["/kv_event_sources"].body)["0"], **changes}
    return {**VLLM, "/kv_event_sources": served_json({"0": config})}


SGLANG_OFF = changed(SGLANG, "/server_info", kv_events=None, kv_events_config=None)
SGLANG_NULL = changed(SGLANG, "/server_info", kv_events=None, kv_events_config='{"publisher":"null"}')
SGLANG_NO_REPLAY = changed(
    SGLANG,
    "/server_info",
    kv_events={"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 18101},
    kv_events_config='{"publisher":"zmq","endpoint":"tcp://*:18101"}',
)
SGLANG_IPC = changed(
    SGLANG, "/server_info", kv_events=None, kv_events_config='{"publisher":"zmq","endpoint":"tcp://*"}'
)


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (without(VLLM, "/kv_event_sources"), problems.NO_EVENT_SOURCES),
        ({**VLLM, "/kv_event_sources": served_json({})}, problems.EVENTS_OFF),
        (vllm_events(enable_kv_cache_events=False), problems.EVENTS_OFF),
        (vllm_events(publisher="null"), problems.EVENTS_OFF),
        (vllm_events(replay_endpoint=None), problems.NO_REPLAY),
        (vllm_events(endpoint="tcp://*"), problems.BAD_ENDPOINT),
        (vllm_events(endpoint="tcp://*:0"), problems.BAD_ENDPOINT),
        (vllm_events(endpoint=None), problems.BAD_ENDPOINT),
        (without(VLLM, "/metrics"), problems.NO_BLOCK_SIZE),
        (SGLANG_OFF, problems.EVENTS_OFF),
        (SGLANG_NULL, problems.EVENTS_OFF),
        (SGLANG_NO_REPLAY, problems.NO_REPLAY),
        (SGLANG_IPC, problems.BAD_ENDPOINT),
        (changed(SGLANG, "/server_info", page_size=None, kv_events=None), problems.NO_BLOCK_SIZE),
    ],
)
def test_what_is_missing_is_said_once(served: dict[str, Answer], expected: str) -> None:
    assert describe(served).problems == (expected,)


def of_version(version: str, **changes: Any) -> EngineDescription:
    return describe(changed(SGLANG_OLD, "/server_info", version=version, **changes))


@pytest.mark.parametrize("version", ["0.4.6.post5", "0.4.10", "0.5.3rc1", "0.5.5.post3"])
def test_events_that_do_not_tell_prefixes_apart_are_not_followed(version: str) -> None:
    """SGLang's blocks were named by their own tokens alone: mem_cache/radix_cache.py of 0.5.5."""
    found = of_version(version)
    assert (found.event_sources, found.problems) == ((), (problems.OLD_EVENTS,))


def test_a_hierarchical_cache_publishes_its_blocks_later() -> None:
    """Not in mem_cache/hiradix_cache.py of SGLang 0.5.9."""
    found = of_version("0.5.9", enable_hierarchical_cache=True)
    assert (found.event_sources, found.problems) == ((), (problems.OLD_EVENTS,))
    assert of_version("0.5.10", enable_hierarchical_cache=True).event_sources


@pytest.mark.parametrize("version", ["0.5.6", "0.5.10.post1", "0.6.0.dev3+g1", "0.0.0.dev0", "1.0.0", "main", "0.5"])
def test_events_of_versions_that_are_newer_or_unknown_are_followed(version: str) -> None:
    found = of_version(version)
    assert (len(found.event_sources), found.problems) == (1, ())


@pytest.mark.parametrize(
    ("version", "expected"), [("0.5.9", (problems.OWN_RANK,)), ("0.5.10", ()), ("0.5.23", ()), ("0.0.0.dev0", ())]
)
def test_an_sglang_that_takes_no_word_on_its_rank(version: str, expected: tuple[str, ...]) -> None:
    events = {**json.loads(SGLANG_OLD["/server_info"].body)["kv_events"], "dp_size": 2}
    assert of_version(version, kv_events=events, dp_size=2).problems == expected
    assert of_version(version).problems == ()


@pytest.mark.parametrize(
    ("version", "expected"), [("0.11.0", (problems.OWN_RANK,)), ("0.9.2", (problems.OWN_RANK,)), ("0.11.1", ())]
)
def test_a_vllm_that_takes_no_word_on_its_rank(version: str, expected: tuple[str, ...]) -> None:
    lines = [f'vllm:cache_config_info{{block_size="16",engine="{rank}"}} 1' for rank in (0, 1)]
    served = {**changed(VLLM, "/version", version=version), "/metrics": Answer(200, "\n".join(lines).encode())}
    assert describe(served).problems == expected
    assert describe(changed(VLLM, "/version", version=version)).problems == ()


@pytest.mark.parametrize(
    "sentence", [value for name, value in vars(problems).items() if name.isupper() and name[0] != "_"]
)
def test_each_sentence_names_a_way_out(sentence: str) -> None:
    assert sentence.endswith((".", "?"))
    assert "--" in sentence or sentence in (problems.NO_ANSWER, problems.NO_MODELS)


@pytest.mark.parametrize("status", [0, -1])
def test_a_worker_that_does_not_answer(status: int) -> None:
    found, asked = drive(probe(HOST), {"/v1/models": Answer(status)})
    assert found == EngineDescription("unknown", problems=(problems.NO_ANSWER,))
    assert asked == ["/v1/models"]


def test_a_worker_that_is_something_else() -> None:
    found = describe({"/v1/models": served_json({"data": [{"id": "gpt", "owned_by": "somebody"}]})})
    assert found == EngineDescription("unknown", models=(Model("gpt"),), problems=(problems.NOT_AN_ENGINE,))


@pytest.mark.parametrize("served", [VLLM, SGLANG])
@pytest.mark.parametrize(
    ("status", "problem"), [(401, problems.WANTS_KEY), (403, problems.WANTS_KEY), (500, problems.NO_MODELS)]
)
def test_a_locked_model_list_does_not_hide_the_engine(served: dict[str, Answer], status: int, problem: str) -> None:
    found = describe({**served, "/v1/models": Answer(status)})
    known = describe(served)
    assert found.problems == (problem,)
    assert (found.kind, found.block_size, found.event_sources) == (known.kind, known.block_size, known.event_sources)


def test_a_worker_that_tells_nothing_without_a_key_is_not_called_something_else() -> None:
    locked = {path: Answer(401) for path in (*VLLM, *SGLANG)}
    assert describe(locked) == EngineDescription("unknown", problems=(problems.WANTS_KEY,))
    found = describe({**locked, "/metrics": SGLANG["/metrics"]})
    assert found == EngineDescription("sglang", problems=(problems.WANTS_KEY,))


def test_sglang_without_metrics_is_known_by_its_server_info() -> None:
    assert describe({**without(SGLANG, "/metrics"), "/v1/models": Answer(401)}).kind == "sglang"


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "engine.local", "tcp://engine.local:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://:::5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://*:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://*:5557", "[fd00::7]", "tcp://[fd00::7]:5557"),
        ("tcp://10.9.9.9:5557", "10.0.0.7", "tcp://10.9.9.9:5557"),
        ("tcp://[fd00::9]:5557", "10.0.0.7", "tcp://[fd00::9]:5557"),
        ("ipc:///tmp/kv", "10.0.0.7", "ipc:///tmp/kv"),
        ("inproc://kv", "10.0.0.7", "inproc://kv"),
    ],
)
def test_endpoints(endpoint: str, host: str, expected: str) -> None:
    served = vllm_events(endpoint=endpoint, replay_endpoint=endpoint)
    (source,) = describe(served, host).event_sources
    assert (source.endpoint, source.replay) == (expected, expected)


@pytest.mark.parametrize(
    "endpoint", ["", "5557", "udp://*:5557", "tcp://:5557", "tcp://*:65536", "tcp://*:5557/x", "tcp://"]
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    assert describe(vllm_events(endpoint=endpoint)).event_sources == ()


@pytest.mark.parametrize(
    ("endpoint", "host", "others", "followed"),
    [
        ("tcp://*:5557", "10.0.0.7", (), True),
        ("tcp://10.0.0.7:5557", "10.0.0.7", (), True),
        ("tcp://ENGINE.local:5557", "engine.local", (), True),
        ("tcp://[FD00::0:7]:5557", "fd00::7", (), True),
        ("tcp://localhost:5557", "127.0.0.1", (), True),
        ("tcp://127.0.0.2:5557", "::1", (), True),
        ("ipc:///tmp/kv", "127.0.0.1", (), True),
        ("tcp://10.0.0.8:5557", "10.0.0.7", ("10.0.0.8",), True),
        ("tcp://10.0.0.8:5557", "10.0.0.7", (), False),
        ("tcp://169.254.169.254:80", "10.0.0.7", ("10.0.0.8",), False),
        ("tcp://localhost:6379", "10.0.0.7", (), False),
        ("tcp://127.0.0.1:6379", "10.0.0.7", (), False),
        ("ipc:///run/some.sock", "10.0.0.7", (), False),
        ("inproc://kv", "127.0.0.1", (), False),
        ("tcp://evil.example:5557", "engine.local", (), False),
    ],
)
def test_events_are_followed_only_where_the_operator_said(
    endpoint: str, host: str, others: tuple[str, ...], followed: bool
) -> None:
    for places in ({"endpoint": endpoint, "replay_endpoint": None}, {"replay_endpoint": endpoint}):
        told = describe(vllm_events(**places), host)
        kept = confined(told, host, others)
        if followed:
            assert kept == told
        else:
            assert kept.event_sources == ()
            assert kept.problems == (*told.problems, problems.FOREIGN_ENDPOINT)
            assert kept.dp_size == told.dp_size


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("served", [VLLM, SGLANG, SGLANG_OLD], ids=["vllm", "sglang", "sglang-old"])
@given(data=st.data())
def test_answers_with_any_field_spoilt_raise_nothing(served: dict[str, Answer], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([path for path, answer in served.items() if answer.body.startswith(b"{")]))
    document = json.loads(served[path].body)
    spoil(document, data)
    found = describe({**served, path: served_json(document)})
    assert found.block_size is None or found.block_size > 0
    assert found.dp_size > 0
    assert msgspec.msgpack.encode(found)


def spoil(document: Any, data: st.DataObject) -> None:
    """Replace one value, anywhere in the document."""
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(json_values)
        return


bodies = st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode())
nonsense = st.builds(Answer, st.sampled_from([200, 404, 500, 0]), bodies)
PATHS = ["/version", "/kv_event_sources", "/metrics", "/server_info", "/get_server_info", "/model_info"]


@pytest.mark.parametrize("owner", ["vllm", "sglang", "?"])
@given(served=st.fixed_dictionaries(dict.fromkeys(PATHS, nonsense)))
def test_nonsense_raises_nothing_and_is_said(owner: str, served: dict[str, Answer]) -> None:
    found, asked = drive(probe(HOST), {**served, "/v1/models": served_json({"data": [{"id": "m", "owned_by": owner}]})})
    assert found.problems
    assert set(asked) <= {"/v1/models", *PATHS}
    assert len(asked) == len(set(asked))


@given(answer=nonsense)
def test_a_nonsense_model_list_raises_nothing(answer: Answer) -> None:
    assert describe({"/v1/models": answer}).kind == "unknown"


def test_deep_nesting_reads_as_no_answer() -> None:
    assert describe({**VLLM, "/kv_event_sources": Answer(200, b"[" * 100_000)}).problems == (problems.NO_EVENT_SOURCES,)


@pytest.mark.parametrize(
    ("metrics", "connector"), [(b"", None), (b'\nvllm:nixl_num_failed_transfers{engine="0"} 0.0\n', "nixl")]
)
def test_vllm_shows_that_it_moves_kv_by_nixl(metrics: bytes, connector: str | None) -> None:
    found = engines.vllm.describe.describe("h", (), {"version": "0.32.0"}, None, metrics)
    assert (found.role, found.connector) == (None, connector)


@pytest.mark.parametrize(
    ("mode", "role"), [("null", "both"), ("prefill", "prefill"), ("decode", "decode"), (None, None)]
)
def test_sglang_tells_its_role(mode: str | None, role: str | None) -> None:
    info = {"page_size": 16, "disaggregation_mode": mode, "disaggregation_bootstrap_port": 8999}
    found = engines.sglang.describe.describe("h", (), info, None)
    assert (found.role, found.bootstrap_port) == (role, 8999)
