"""Turns this process into an engine that serves the tiny model and publishes its KV events. The weights are dummies,
which the engine makes itself, unless KV from another engine is to be told right from wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .install import is_installed
from .model import kept_model
from .pair import Half
from .places import HERE, engines_folder
from .store import Member, master_arguments

REPLAY_OFFSET = 100
COMMON_ENV = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
VLLM_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
SGLANG_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
PREFERENCES = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Only where the caller's environment says nothing."""
DUMMIES, WEIGHTS = "--load-format dummy", "--load-format auto --dtype float32"
"""In bfloat16 an answer to the same prompt depends, after some tokens, on what else is in the batch."""


class CannotServe(Exception):
    """What is missing, and what to do about it."""


def serve(engine: str, name: str, port: int, events_port: int, extra: list[str], *, weights: bool = False) -> None:
    venv = _installed(engine, engine)
    model, load = kept_model(weights=weights), WEIGHTS if weights else DUMMIES
    events = _events(name, events_port)
    make, special = (_vllm, VLLM_ENV) if engine == "vllm" else (_sglang, SGLANG_ENV)
    _become([*make(venv, model, load, port, events), *extra], special)


def serve_half(half: Half, name: str, port: int, events_port: int, extra: list[str]) -> None:
    """A vLLM that is the prefill or the decode half of a pair."""
    venv = _installed("vllm", "pd")
    command = _vllm(venv, kept_model(weights=True), WEIGHTS, port, _events(name, events_port))
    _become([*command, *half.arguments(), *extra], VLLM_ENV | half.environment())


def serve_member(member: Member, name: str, port: int, events_port: int, extra: list[str]) -> None:
    """A vLLM that keeps its blocks in a store too."""
    venv = _installed("vllm", "mooncake")
    command = _vllm(venv, kept_model(weights=True), WEIGHTS, port, _events(name, events_port))
    _become([*command, *member.arguments(), *extra], VLLM_ENV | member.environment(engines_folder()))


def serve_master(rpc_port: int, http_port: int, extra: list[str]) -> None:
    venv = _installed("vllm", "mooncake")
    _become([f"{venv}/bin/mooncake_master", *master_arguments(rpc_port, http_port), *extra], {})


def serve_segment(host: str, rpc_port: int, megabytes: int) -> None:
    venv = _installed("vllm", "mooncake")
    _become([f"{venv}/bin/python", str(HERE / "segment.py"), host, f"127.0.0.1:{rpc_port}", str(megabytes)], {})


def _installed(engine: str, part: str) -> Path:
    venv = engines_folder() / engine
    if not is_installed(part):
        raise CannotServe(f"{part} is not installed: run scripts/real-engines install {part}")
    return venv


def _become(command: list[str], special: dict[str, str]) -> None:
    os.execve(command[0], command, PREFERENCES | os.environ | COMMON_ENV | special)


def _events(name: str, port: int) -> dict[str, Any]:
    """The wildcard makes the engine bind; with an address it would connect."""
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + REPLAY_OFFSET}",
        "topic": f"kv@{name}@tiny",
    }


def _vllm(venv: Path, model: Path, load: str, port: int, events: dict[str, Any]) -> list[str]:
    command = f"""{venv}/bin/vllm serve {model} --served-model-name tiny {load} --max-model-len 8192
        --host 127.0.0.1 --port {port} --enforce-eager --block-size 32 --enable-prefix-caching
        --enable-prompt-tokens-details --kv-events-config"""
    return [*command.split(), json.dumps({"enable_kv_cache_events": True, **events})]


def _sglang(venv: Path, model: Path, load: str, port: int, events: dict[str, Any]) -> list[str]:
    command = f"""{venv}/bin/python -m sglang.launch_server --model-path {model} --served-model-name tiny
        --device cpu --attention-backend torch_native --sampling-backend pytorch --dtype bfloat16 {load}
        --context-length 8192 --max-total-tokens 16384 --page-size 16 --chunked-prefill-size 2048
        --max-running-requests 16 --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled
        --disable-overlap-schedule --skip-server-warmup --sleep-on-idle --grammar-backend none
        --host 127.0.0.1 --port {port} --enable-metrics --enable-cache-report --kv-events-config"""
    return [*command.split(), json.dumps(events)]
