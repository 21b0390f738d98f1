"""The load of each rank: from recorded answers, from older engines, from nonsense."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import prometheus
from engines.description import EngineDescription
from engines.load import poll
from engines.probe import Answer
from engines.rank_load import RankLoad
from indexer.events import LoadReport
from tests.engines.recordings import answers, drive

VLLM = EngineDescription("vllm", block_size=32, total_blocks=64)
SGLANG = EngineDescription("sglang", block_size=16, total_blocks=128, max_running=4)


def load(description: EngineDescription, served: dict[str, Answer]) -> dict[int, RankLoad]:
    return drive(poll(description), served)[0]


def text(*lines: str) -> Answer:
    return Answer(200, "\n".join(lines).encode())


def served_json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode())


def test_the_figures_are_those_of_a_load_report() -> None:
    ours = [(field.name, field.type) for field in msgspec.structs.fields(RankLoad)]
    assert ours == [(field.name, field.type) for field in msgspec.structs.fields(LoadReport)][5:]


IDLE = RankLoad(
    num_requests_waiting=0,
    gpu_cache_usage_perc=0.0,
    request_active_slots=0,
    kv_active_blocks=0,
    kv_total_blocks=64,
)


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("idle", IDLE),
        # 9 of 63 are free: the 64th is the null block.
        (
            "under load",
            RankLoad(
                num_requests_waiting=3,
                gpu_cache_usage_perc=1 - 9 / 63,
                gpu_prefix_cache_hit_rate=448 / 2491,
                request_active_slots=3,
                kv_active_blocks=54,
                kv_total_blocks=64,
            ),
        ),
    ],
)
def test_vllm_as_recorded(moment: str, expected: RankLoad) -> None:
    found, asked = drive(poll(VLLM), answers("vllm-0.32.0", moment))
    assert found == {0: expected}
    assert asked == ["/metrics"]


def test_labels_are_read_once_unless_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM repeats its configuration, forty labels, with every answer."""
    read, names = [], prometheus._LABEL

    class Labels:
        def match(self, text: str, place: int) -> re.Match[str] | None:
            read.append(len(text))
            return names.match(text, place)

    prometheus._known_labels.cache_clear()
    monkeypatch.setattr(prometheus, "_LABEL", Labels())
    usual, many = (f'engine="3",read_once="{"x" * size}"' for size in (1000, 4096))
    for _ in range(3):
        for labels in (usual, many):
            found = load(VLLM, {"/metrics": text(f"vllm:num_requests_running{{{labels}}} 7")})
            assert found[3].request_active_slots == 7
    assert Counter(read) == {len(usual): 2, len(many): 6}


@pytest.mark.parametrize(
    ("lines", "slots"),
    [
        ([], None),
        (['vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.7e+09'], 4),
        (['vllm:lora_requests_info{running_lora_adapters="a",max_lora="2",waiting_lora_adapters="b"} 1.7e+09'] * 3, 2),
        (['vllm:lora_requests_info{running_lora_adapters="x\\",max_lora=\\"9",max_lora="1"} 1'], 1),
        (['# HELP vllm:lora_requests_info max_lora="3"'], None),
        (['vllm:lora_requests_info{max_lora="many"} 1', 'other{max_lora="3"} 1'], None),
    ],
)
def test_how_many_adapters_vllm_runs_at_once(lines: list[str], slots: int | None) -> None:
    """Its page has a line for each set of adapters that ever ran together."""
    found = load(VLLM, {"/metrics": text("# TYPE x gauge", 'vllm:num_requests_running{engine="0"} 1', *lines)})
    assert found[0].lora_total_slots == slots


def test_how_many_adapters_sglang_runs_at_once_is_told_when_it_is_described() -> None:
    entry = {"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": 0}
    loads = {"/v1/loads": served_json({"loads": [entry]})}
    assert load(SGLANG, loads)[0].lora_total_slots is None
    assert load(msgspec.structs.replace(SGLANG, max_loras=8), loads)[0].lora_total_slots == 8


def sglang_recorded(waiting: int, running: int, tokens: int, usage: float) -> RankLoad:
    return RankLoad(
        num_requests_waiting=waiting,
        gpu_cache_usage_perc=usage,
        gpu_prefix_cache_hit_rate=0.0,
        request_active_slots=running,
        request_total_slots=4,
        kv_active_blocks=tokens // 16,
        kv_total_blocks=128,
    )


@pytest.mark.parametrize(
    ("name", "moment", "expected"),
    [
        ("sglang-0.5.23", "idle", sglang_recorded(0, 0, 0, 0.0)),
        ("sglang-0.5.23", "under load", sglang_recorded(4, 2, 1184, 0.5781)),
        ("sglang-0.5.18", "under load", sglang_recorded(4, 2, 1088, 0.5312)),
    ],
)
def test_sglang_as_recorded(name: str, moment: str, expected: RankLoad) -> None:
    found, asked = drive(poll(SGLANG), answers(name, moment))
    assert found == {0: expected}
    assert asked == ["/v1/loads"]


@pytest.mark.parametrize("name", ["sglang-0.5.23", "sglang-0.5.18"])
def test_sglangs_metrics_say_the_same_as_its_loads(name: str) -> None:
    served = answers(name, "after load")
    only_metrics = {"/metrics": served["/metrics"]}
    found, asked = drive(poll(SGLANG), only_metrics)
    assert found == load(SGLANG, served) != {}
    assert asked == ["/v1/loads", "/get_load", "/metrics"]


def test_sglangs_older_get_load() -> None:
    entries = [
        {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 500, "num_pending_tokens": 83},
        {"dp_rank": 1, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 40},
    ]
    found, asked = drive(poll(SGLANG), {"/get_load": served_json(entries)})
    assert asked == ["/v1/loads", "/get_load"]
    assert found[0] == RankLoad(2, None, None, 3, 4, 27, 128)  # 417 tokens are 26 pages and a bit
    assert found[1] == RankLoad(0, None, None, 1, 4, None, 128)


def test_ranks_count_from_a_servers_first() -> None:
    lines = [f'vllm:num_requests_running{{engine="{rank}"}} {rank}' for rank in (8, 9, 10)]
    lines += ['vllm:cache_config_info{engine="9",num_gpu_blocks="None"} 1']  # known later
    found = load(msgspec.structs.replace(VLLM, first_rank=9), {"/metrics": text(*lines)})
    assert {rank: one.request_active_slots for rank, one in found.items()} == {0: 9, 1: 10}
    assert {rank: one.kv_total_blocks for rank, one in found.items()} == {0: 64, 1: 64}


def test_vllms_ranks_share_the_blocks_that_each_states() -> None:
    lines = [f'vllm:kv_cache_usage_perc{{engine="{rank}"}} 0.5' for rank in (0, 1)]
    lines += [f'vllm:cache_config_info{{engine="{rank}",num_gpu_blocks="202"}} 1' for rank in (0, 1)]
    found = load(EngineDescription("vllm", dp_size=2), {"/metrics": text(*lines)})
    assert [(one.kv_active_blocks, one.kv_total_blocks) for one in found.values()] == [(50, 101), (50, 101)]


def test_ranks_are_kept_apart() -> None:
    lines = [f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank + 1}.0' for rank in (0, 1, 10)]
    found = load(VLLM, {"/metrics": text(*lines)})
    assert {rank: rank_load.request_active_slots for rank, rank_load in found.items()} == {0: 1, 1: 2, 10: 11}
    loads = {"loads": [{"dp_rank": rank, "num_running_reqs": rank + 1} for rank in (0, 1)]}
    found = load(SGLANG, {"/v1/loads": served_json(loads)})
    assert {rank: rank_load.request_active_slots for rank, rank_load in found.items()} == {0: 1, 1: 2}
    lines = [f'sglang:num_running_reqs{{dp_rank="{rank}",tp_rank="0"}} {rank + 1}' for rank in (0, 1)]
    found = load(SGLANG, {"/metrics": text(*lines)})
    assert {rank: rank_load.request_active_slots for rank, rank_load in found.items()} == {0: 1, 1: 2}


def test_priorities_do_not_replace_the_total() -> None:
    lines = ['sglang:num_queue_reqs{priority=""} 7', 'sglang:num_queue_reqs{priority="1"} 2']
    assert load(SGLANG, {"/metrics": text(*lines)})[0].num_requests_waiting == 7


@pytest.mark.parametrize("description", [EngineDescription("vllm"), EngineDescription("sglang")])
def test_nothing_is_invented(description: EngineDescription) -> None:
    metrics = text("vllm:num_requests_running 1", 'sglang:num_running_reqs{tp_rank="0"} 1')
    assert load(description, {"/metrics": metrics}) == {0: RankLoad(request_active_slots=1)}


def test_active_blocks_need_the_total() -> None:
    usage = 'vllm:kv_cache_usage_perc{engine="0"} 0.5'
    found = load(EngineDescription("vllm"), {"/metrics": text(usage)})[0]
    assert (found.gpu_cache_usage_perc, found.kv_active_blocks, found.kv_total_blocks) == (0.5, None, None)
    known = 'vllm:cache_config_info{engine="0",num_gpu_blocks="101"} 1.0'
    found = load(EngineDescription("vllm"), {"/metrics": text(usage, known)})[0]
    assert (found.kv_active_blocks, found.kv_total_blocks) == (50, 101)
    unknown = 'vllm:cache_config_info{engine="0",num_gpu_blocks="None"} 1.0'
    assert load(EngineDescription("vllm"), {"/metrics": text(usage, unknown)})[0].kv_total_blocks is None


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_running{engine=0} 1",
        'vllm:num_requests_running{engine="0" 1',
        'vllm:num_requests_running{engine="0"} one',
        'vllm:num_requests_running{engine="0"} NaN',
        'vllm:num_requests_running{engine="0"} +Inf',
        'vllm:num_requests_running{engine="x"} 1',
        'vllm:num_requests_running{engine="-1"} 1',
        '# vllm:num_requests_running{engine="0"} 1',
        'vllm:num_requests_running_total{engine="0"} 1',
    ],
)
def test_lines_that_are_not_well_formed_are_left_out(line: str) -> None:
    assert load(VLLM, {"/metrics": text(line)}) == {}


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running 7",
        "vllm:num_requests_running 7e0 1700000000000",
        'vllm:num_requests_running{engine="0",} 7\r',
        'vllm:num_requests_running{model_name="a\\"b,c} \\\\",engine="0"} 7.0',
    ],
)
def test_lines_that_are_well_formed(line: str) -> None:
    assert load(VLLM, {"/metrics": text("# HELP x y", line)})[0].request_active_slots == 7


@pytest.mark.parametrize("value", ["-1", "1e300"])
def test_absurd_counts_and_shares_are_unknown(value: str) -> None:
    names = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"]
    lines = [f'vllm:{name}{{engine="0"}} {value}' for name in names]
    assert load(EngineDescription("vllm"), {"/metrics": text(*lines)}) == {0: RankLoad()}


@pytest.mark.parametrize("status", [0, -1, 404, 500])
@pytest.mark.parametrize("description", [VLLM, SGLANG, EngineDescription("unknown")])
def test_an_engine_that_does_not_answer_has_no_load(description: EngineDescription, status: int) -> None:
    served = dict.fromkeys(("/metrics", "/v1/loads", "/get_load"), Answer(status, b"vllm:num_requests_running 1"))
    found, asked = drive(poll(description), served)
    assert found == {}
    if status <= 0:
        assert len(asked) <= 1


values: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)
fields = st.sampled_from(
    ["dp_rank", "num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage",
     "max_running_requests", "cache_hit_rate", "num_reqs", "num_tokens", "num_pending_tokens"]
)  # fmt: skip
entries = st.lists(st.dictionaries(fields, values) | values, max_size=3)


def carried(found: dict[int, RankLoad]) -> bool:
    """Whether every rank's load fits on the event plane."""
    reports = [LoadReport("w", rank, 1, 0, True, *msgspec.structs.astuple(it)) for rank, it in found.items()]
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(it), type=LoadReport) for it in reports] == reports


@given(entries=entries)
def test_hostile_loads_raise_nothing(entries: list[Any]) -> None:
    assert carried(load(SGLANG, {"/v1/loads": served_json({"loads": entries})}))
    assert carried(load(SGLANG, {"/get_load": served_json(entries)}))


lines = st.builds(
    '{}{{engine="{}",dp_rank="{}",num_gpu_blocks="{}"}} {}'.format,
    st.sampled_from(
        ["vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info", "sglang:num_used_tokens"]
    ),
    st.integers(-1, 2) | st.text(max_size=3),
    st.integers(-1, 2) | st.text(max_size=3),
    st.integers() | st.text(max_size=3),
    st.floats() | st.integers() | st.text(max_size=3),
)


@given(exposition=st.lists(lines | st.text(max_size=20), max_size=6).map("\n".join) | st.text())
def test_hostile_metrics_raise_nothing(exposition: str) -> None:
    served = {"/metrics": Answer(200, exposition.encode("utf-8", "surrogatepass"))}
    assert carried(load(VLLM, served))
    assert carried(load(SGLANG, served))
