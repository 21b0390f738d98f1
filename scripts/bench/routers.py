"""How each router is started in front of a fleet, and when it counts as up."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from publishers.embedded_nats import nats_server_binary

from . import peers
from .processes import CannotStart, Child, free_port, python_of, status
from .prompt_cache import BLOCK_SIZE, BLOCKS
from .workloads import MODEL

_LISTENING = re.compile(r"Listening on (http://\S+)")
_START_S = 240.0
"""Our first start on a machine compiles the index's loops: half a minute, and several times that beside other work."""
_ASK = json.dumps({"model": MODEL, "prompt": "Are you up?", "max_tokens": 1}).encode()


class Running(NamedTuple):
    """`pid`: the process whose CPU time, with its descendants', is counted."""

    name: str
    url: str
    pid: int
    command: str


@contextmanager
def fleet(name: str, workers: int, *flags: str) -> Iterator[list[str]]:
    """Fake workers; yields their URLs."""
    command = [sys.executable, "-m", "scripts.bench.fake_worker", "--workers", str(workers), *flags]
    with _started(name, command) as child:
        child.wait_until(lambda: "\n" in child.output())
        try:
            urls: list[str] = json.loads(child.output())["workers"]
        except ValueError:
            raise CannotStart(f"{name}: {child.last_words()}") from None
        yield urls


@contextmanager
def ours(mode: str, workers: Sequence[str], *flags: str, label: str = "") -> Iterator[Running]:
    """`label` tells one from another of the same mode."""
    named = [part for url in workers for part in ("--worker", url)]
    arguments = ["--router-mode", mode, "--port", "0", "--log-level", "warning", *flags]
    log = f"ours-{mode}{label}".replace(" ", "-")
    with _started(log, [sys.executable, "-m", "router", *arguments, *named]) as child:
        child.wait_until(lambda: _LISTENING.search(child.output()) is not None, _START_S)
        found = _LISTENING.search(child.output())
        url = found[1] if found else ""
        child.wait_until(lambda: status(f"{url}/ready") == 200)
        yield _up(child, f"ours {mode}{label}", url, ["python", "-m", "router", *arguments, "--worker", "..."])


@contextmanager
def publishers(workers: Sequence[str]) -> Iterator[str]:
    """One beside each worker, as where a fleet has several routers; yields the event plane's URL."""
    with ExitStack() as stack:
        port = free_port()
        server = [str(nats_server_binary()), "--addr", "127.0.0.1", "--port", str(port)]
        child = stack.enter_context(_started("nats-server", server))
        child.wait_until(lambda: "Server is ready" in child.output())
        plane = f"nats://127.0.0.1:{port}"
        for number, worker in enumerate(workers):
            command = [sys.executable, "-m", "publishers", "--engine", worker, "--nats", plane]
            stack.enter_context(_started(f"publisher-{number}", command))
        yield plane


def vllm_router(policy: str, workers: Sequence[str]) -> AbstractContextManager[Running]:
    return _rust("vllm-router", "vllm_router.launch_router", policy, workers, "warning")


def sglang_router(policy: str, workers: Sequence[str]) -> AbstractContextManager[Running]:
    return _rust("sglang-router", "sglang_router.launch_router", policy, workers, "warn")


@contextmanager
def _rust(peer: str, module: str, policy: str, workers: Sequence[str], level: str) -> Iterator[Running]:
    """The two have one ancestor and the same flags."""
    port = free_port()
    flags = ["--policy", policy, "--host", "127.0.0.1", "--log-level", level]
    ports = ["--port", str(port), "--prometheus-port", str(free_port())]
    command = [_python(peer), "-m", module, *flags, *ports, "--worker-urls", *workers]
    with _started(f"{peer}-{policy}", command) as child:
        yield _up(
            child,
            f"{peer} {policy}",
            f"http://127.0.0.1:{port}",
            ["python", "-m", module, *flags, "--worker-urls", "..."],
        )


@contextmanager
def dynamo(model: Path, workers: int, tokenizer: str) -> Iterator[Running]:
    """Front end and mocker find each other in a folder and speak TCP and ZMQ: no etcd, no NATS."""
    python, port = _python("ai-dynamo"), free_port()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-router-bench"))
        environment = {"DYN_FILE_KV": folder, "DYN_LOG": "warn", "HF_HUB_OFFLINE": "1", "DYN_TCP_RPC_HOST": "127.0.0.1"}
        planes = ["--discovery-backend", "file", "--event-plane", "zmq", "--request-plane", "tcp"]
        mocker = ["-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL, "--speedup-ratio", "0"]
        sizes = [
            "--block-size",
            str(BLOCK_SIZE),
            "--num-gpu-blocks-override",
            str(BLOCKS),
            "--num-workers",
            str(workers),
        ]
        stack.enter_context(_started("dynamo-mocker", [python, *mocker, *sizes, *planes], environment))
        flags = ["-m", "dynamo.frontend", "--router-mode", "kv", "--kv-cache-block-size", str(BLOCK_SIZE)]
        flags += ["--tokenizer", tokenizer, "--http-host", "127.0.0.1", *planes]
        command = [python, *flags, "--http-port", str(port)]
        child = stack.enter_context(_started(f"dynamo-{tokenizer}", command, environment))
        yield _up(child, f"dynamo kv ({tokenizer} tokenizer)", f"http://127.0.0.1:{port}", ["python", *flags])


@contextmanager
def _started(name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[Child]:
    child = Child(name, command, environment)
    try:
        yield child
    finally:
        child.stop()


def _python(peer: str) -> str:
    if reason := peers.install(peer):
        raise CannotStart(f"{peer} {reason}")
    return python_of(peers.venv_of(peer))


def _up(child: Child, name: str, url: str, shown: Sequence[str]) -> Running:
    """Up is what serves ten requests in a row, so that every worker is known."""
    child.wait_until(lambda: all(status(f"{url}/v1/completions", _ASK) == 200 for _ in range(10)))
    return Running(name, url, child.pid, " ".join(shown))


class Field:
    """All routers of a comparison, up at the same time; one that does not start is left out with its reason."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.running: list[Running] = []
        self.missing: dict[str, str] = {}

    def add(self, name: str, router: AbstractContextManager[Running]) -> None:
        try:
            self.running.append(self._stack.enter_context(router))
        except CannotStart as error:
            self.missing[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)
