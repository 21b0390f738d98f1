"""vLLM engines that share one GPU, each with its own part of the memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from scripts.bench.processes import Child, free_port, status

START_S = 400.0
"""The first engine on a machine compiles its kernels."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache, with which every mode starts
}


class Engine(NamedTuple):
    """`command`: what runs vLLM, such as `vllm`. `memory_share` of the GPU's memory must be free when it starts."""

    command: str
    model: Path
    kv_gigabytes: float
    memory_share: float
    extra: Sequence[str] = ()


@contextmanager
def fleet(engine: Engine, workers: int) -> Iterator[list[str]]:
    """Yields each worker as the router's `--worker` takes it. Raises CannotStart."""
    with ExitStack() as stack:
        started = [_start(stack, engine, number) for number in range(workers)]
        for child, url, _ in started:
            child.wait_until(lambda url=url: status(f"{url}/health") == 200, START_S)  # type: ignore[misc]
        yield [spec for _, _, spec in started]


def _start(stack: ExitStack, engine: Engine, number: int) -> tuple[Child, str, str]:
    port, events, replay = free_port(), free_port(), free_port()
    publisher = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    flags = f"""serve {engine.model} --served-model-name {engine.model.name} --load-format dummy
        --host 127.0.0.1 --port {port} --enable-prompt-tokens-details --max-num-seqs 128
        --kv-cache-memory-bytes {int(engine.kv_gigabytes * 1e9)} --gpu-memory-utilization {engine.memory_share}"""
    command = [engine.command, *flags.split(), "--kv-events-config", json.dumps(publisher), *engine.extra]
    child = Child(f"gpu-engine-{number}", command, _ENVIRONMENT)
    stack.callback(child.stop)
    url = f"http://127.0.0.1:{port}"
    return child, url, f"{url},events=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"
