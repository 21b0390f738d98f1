"""What engines answer when they are asked what they are and how busy."""

from __future__ import annotations

import re
from collections.abc import Hashable

import msgspec

import engines.sglang.load
import engines.vllm.load
from engines.description import EngineDescription
from engines.load import poll
from engines.probe import Answer, probe
from indexer.events import NO_EVENTS, LoadReport, decode_load, encode
from tests.engines.recordings import answers, drive
from tests.fuzz.target import DEEP_JSON, JSON, Target

_PATHS = (
    "/v1/models",
    "/version",
    "/kv_event_sources",
    "/metrics",
    "/server_info",
    "/model_info",
    "/v1/loads",
    "/get_load",
)
_RECORDED = ("vllm-0.32.0", "sglang-0.5.23", "sglang-0.5.18")
_MOST_ASKED = 6
_ENDPOINT = re.compile(r"tcp://.+:[0-9]{1,5}|(ipc|inproc)://.*", re.DOTALL)


def _engine(data: bytes) -> Hashable:
    """An engine as a JSON object: by path, what it answers (text as it is). It is described, and its load is read."""
    served = _served(data)
    found, asked = drive(probe("10.0.0.7"), served)
    assert len(asked) <= _MOST_ASKED
    for source in found.event_sources:
        assert _ENDPOINT.fullmatch(source.endpoint)
    loads = _loads(found, served)
    return found.kind, found.problems, len(found.models), found.role, len(loads), found.block_size is None


def _served(data: bytes) -> dict[str, Answer]:
    """What is no object of answers is answered to every path."""
    try:
        found = JSON.decode(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return {path: Answer(200, data) for path in _PATHS}
    return {
        path: Answer(200, value.encode() if isinstance(value, str) else JSON.encode(value))
        for path, value in found.items()
    }


def _loads(found: EngineDescription, served: dict[str, Answer]) -> tuple[int, ...]:
    """Whatever is read of a load can be reported, and is read again as it was."""
    loads, asked = drive(poll(found), served)
    assert len(asked) <= 3
    for rank, load in loads.items():
        report = LoadReport("w", rank, NO_EVENTS, -1, False, **msgspec.structs.asdict(load))
        assert decode_load(encode(report)) == report
    return tuple(loads)


def _metrics(data: bytes) -> Hashable:
    """A page of metrics by itself, read as each engine's."""
    found = []
    for kind, read in (("vllm", engines.vllm.load.read), ("sglang", engines.sglang.load.read_metrics)):
        loads = read(data, EngineDescription("vllm", block_size=16, total_blocks=100))
        for rank, load in loads.items():
            report = LoadReport("w", rank, NO_EVENTS, -1, False, **msgspec.structs.asdict(load))
            assert decode_load(encode(report)) == report
        found.append((kind, len(loads), *(_given(load) for load in loads.values())))
    return tuple(found)


def _given(load: msgspec.Struct) -> Hashable:
    return tuple(value is not None for value in msgspec.structs.astuple(load))


def _engines() -> list[bytes]:
    """The recorded ones, idle and at work."""
    found = []
    for name in _RECORDED:
        for load in ("idle", "under load", "after load"):
            served = {path: _value(answer) for path, answer in answers(name, load).items() if path in _PATHS}
            found += [JSON.encode(served), *(JSON.encode({path: value}) for path, value in served.items())]
    return found


def _value(answer: Answer) -> object:
    try:
        return JSON.decode(answer.body)
    except ValueError:
        return answer.body.decode()


def _pages() -> list[bytes]:
    return [answers(name, load)["/metrics"].body for name in _RECORDED for load in ("idle", "under load")]


_WORDS = (
    *DEEP_JSON, b"null", b"true", b'"0"', b'"dp_rank"', b'"loads"', b'"kv_events"', b'"tcp://*:5557"',
    b'"tcp://[::]:1"', b"tcp://a:99999", b"ipc://x", b"vllm:num_requests_running", b"vllm:cache_config_info",
    b"vllm:kv_cache_usage_perc", b"sglang:token_usage", b"sglang:num_used_tokens", b'{engine="0"}',
    b'{engine="1",num_gpu_blocks="5"} 1', b'dp_rank="1"', b"NaN", b"+Inf", b"1e400", b"-1", b"\n", b"\\\\", b'\\"',
    b'\\n', b'"', b"# TYPE", b" 1 123", b"\xff", "é²".encode(), b"9" * 4400,
)  # fmt: skip

TARGETS = (
    Target("engine-answers", _engine, _engines, _WORDS, JSON, share=50),
    Target("metrics", _metrics, _pages, _WORDS, share=50),
)
