"""Turns this process into an engine that serves the tiny model with dummy weights and publishes its KV events."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .model import kept_model
from .places import engines_folder

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


class CannotServe(Exception):
    """What is missing, and what to do about it."""


def serve(engine: str, name: str, port: int, events_port: int, extra: list[str]) -> None:
    venv = engines_folder() / engine
    if not (venv / f".{engine}-installed").exists():
        raise CannotServe(f"{engine} is not installed: run scripts/real-engines install {engine}")
    model = kept_model()
    events = _events(name, events_port)
    command = _vllm(venv, model, port, events) if engine == "vllm" else _sglang(venv, model, port, events)
    special = VLLM_ENV if engine == "vllm" else SGLANG_ENV
    os.execve(command[0], [*command, *extra], PREFERENCES | os.environ | COMMON_ENV | special)


def _events(name: str, port: int) -> dict[str, Any]:
    """The wildcard makes the engine bind; with an address it would connect."""
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + REPLAY_OFFSET}",
        "topic": f"kv@{name}@tiny",
    }


def _vllm(venv: Path, model: Path, port: int, events: dict[str, Any]) -> list[str]:
    command = f"""{venv}/bin/vllm serve {model} --served-model-name tiny --load-format dummy --max-model-len 8192
        --host 127.0.0.1 --port {port} --enforce-eager --block-size 32 --enable-prefix-caching
        --enable-prompt-tokens-details --kv-events-config"""
    return [*command.split(), json.dumps({"enable_kv_cache_events": True, **events})]


def _sglang(venv: Path, model: Path, port: int, events: dict[str, Any]) -> list[str]:
    command = f"""{venv}/bin/python -m sglang.launch_server --model-path {model} --served-model-name tiny
        --load-format dummy --device cpu --attention-backend torch_native --sampling-backend pytorch --dtype bfloat16
        --context-length 8192 --max-total-tokens 16384 --page-size 16 --chunked-prefill-size 2048
        --max-running-requests 16 --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled
        --disable-overlap-schedule --skip-server-warmup --sleep-on-idle --grammar-backend none
        --host 127.0.0.1 --port {port} --enable-metrics --enable-cache-report --kv-events-config"""
    return [*command.split(), json.dumps(events)]
