"""The real engines and the things of ours in front of them, each as child processes."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .asking import Answer, ask, get
from .eventually import eventually
from .processes import ROOT, Process, free_port
from .prompts import PREFIX_LEAST, filler

EngineKind = Literal["vllm", "sglang"]

ENGINE_START = 200.0
ROUTER_START = 90.0
"""In a fresh clone the first one compiles its kernels, beside engines that start."""
CACHE_TOKENS = 4096
"""Small, so that a few prompts push everything else out."""
LONGEST_PROMPT = 2048
FILLERS, FILLER_TOKENS = 5, 1024
ON_THE_WAY = 0.06
"""Seconds for an answer's events, which come after it."""
EVENTS_OFFSET, TRANSFER_OFFSET, REPLAY_OFFSET = 1, 2, 101

FLAGS: dict[EngineKind, tuple[str, ...]] = {
    "vllm": (
        *("--max-model-len", str(LONGEST_PROMPT), "--num-gpu-blocks-override", str(CACHE_TOKENS // 32)),
        "--enable-scale-out",
    ),
    "sglang": (
        "--context-length", str(LONGEST_PROMPT), "--max-total-tokens", str(CACHE_TOKENS), "--enable-response-store",
    ),
}  # fmt: skip
VLLM_SETTINGS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
"""/reset_prefix_cache; answers of /v1/responses are kept, as SGLang's flag says above."""
RESET: dict[EngineKind, str] = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}
BLOCK: dict[EngineKind, int] = {"vllm": 32, "sglang": 16}


class Engine:
    def __init__(self, kind: EngineKind, name: str, logs: Path, *flags: str) -> None:
        port = free_port(EVENTS_OFFSET, TRANSFER_OFFSET, REPLAY_OFFSET)
        self.kind = kind
        self.block = BLOCK[kind]
        self.worker_id = f"127.0.0.1:{port}"
        self.url = f"http://{self.worker_id}"
        command = [str(ROOT / "scripts/real-engines"), *self._serve(name, port), *flags]
        self.process = Process(command, logs / f"{name}.log", VLLM_SETTINGS)

    def _serve(self, name: str, port: int) -> list[str]:
        return ["serve", self.kind, name, str(port), str(port + EVENTS_OFFSET), *FLAGS[self.kind]]

    @property
    def worker(self) -> str:
        """As --worker takes it."""
        return self.url

    def wait_until_up(self) -> None:
        eventually(self._is_up, within=ENGINE_START)

    def _is_up(self) -> bool:
        self.process.assert_running()
        return get(f"{self.url}/health").status == 200

    def restart(self) -> None:
        self.process.kill()
        self.process.start()
        self.wait_until_up()

    def reset_cache(self) -> None:
        """Refused while a request runs; vLLM publishes it only with the next request."""
        eventually(lambda: ask(f"{self.url}{RESET[self.kind]}").status, lambda status: status == 200)

    def __repr__(self) -> str:
        return f"{self.kind} {self.worker_id}"


class Router:
    """`python -m router`, asked as any client would."""

    def __init__(
        self, name: str, engines: Sequence[Engine], logs: Path, *args: str, env: Mapping[str, str] | None = None
    ) -> None:
        workers = [part for engine in engines for part in ("--worker", engine.worker)]
        command = [sys.executable, "-m", "router", "--router-mode", "kv", "--port", "0", *workers, *args]
        self.name = name
        self.process = Process(command, logs / f"{name}.log", env)
        self.url = ""

    def __repr__(self) -> str:
        return self.name

    def start(self) -> None:
        """Returns when it serves and every worker is up."""
        self.process.start()
        found = eventually(self._listening, within=ROUTER_START)
        assert found is not None
        self.url = found
        self.until_all_are_up()

    def until_all_are_up(self) -> None:
        eventually(
            lambda: get(f"{self.url}/ready").json()["workers"],
            lambda workers: all(worker["up"] for worker in workers),
            within=ROUTER_START,
        )

    def _listening(self) -> str | None:
        self.process.assert_running()
        found = re.search(r"Listening on (http://\S+)", self.process.output())
        return found[1] if found else None

    def ask(self, body: Mapping[str, Any], worker: str | None = None) -> Answer:
        """A completion or, when there are messages, a chat completion; `worker` pins it."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return ask(self.url + path, body, headers={"X-Router-Target-Worker": worker} if worker else None)

    def state(self, engine: Engine) -> dict[str, Any]:
        """What /ready says of a worker; `up`, `view` and `blocks` are there for any worker."""
        answer = get(f"{self.url}/ready")
        [worker] = [worker for worker in answer.json()["workers"] if worker["id"] == engine.worker_id]
        [rank] = worker["ranks"]
        return {"up": worker["up"], "view": rank["index"], "blocks": sum(rank["blocks"].values())}

    def until_known(self, engine: Engine, body: Mapping[str, Any], at_least: int = PREFIX_LEAST) -> Answer:
        """Asks one worker the same again, until the events have arrived: the router predicts what the engine reports,
        and that is the prefix. Not by assumption: a router without events predicts too."""

        def right(answer: Answer) -> bool:
            known = answer.status == 200 and answer.reported >= at_least and agrees(answer, engine)
            return known and self.state(engine)["view"] == "exact"

        return eventually(lambda: self.ask(body, engine.worker_id), right)

    def fill(self, engine: Engine, name: str) -> None:
        """Pushes all else out of a worker's cache. Events keep their order: once the last is known, so is the rest."""
        for number in range(FILLERS):
            assert self.ask(filler(f"{name} {number}", FILLER_TOKENS), engine.worker_id).status == 200
        self.until_known(engine, filler(f"{name} {FILLERS - 1}", FILLER_TOKENS), FILLER_TOKENS - engine.block)


class Publisher:
    """`python -m publishers` beside one engine."""

    def __init__(self, engine: Engine, nats_url: str, logs: Path) -> None:
        command = [sys.executable, "-m", "publishers", "--engine", engine.url, "--nats", nats_url]
        self.process = Process(command, logs / f"publisher-{engine.worker_id}.log")


class Nats:
    """A nats-server that comes back on its port."""

    def __init__(self, logs: Path) -> None:
        binary = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
        assert binary is not None
        port = free_port()
        self.url = f"nats://127.0.0.1:{port}"
        self.process = Process([binary, "-a", "127.0.0.1", "-p", str(port)], logs / "nats.log")

    def start(self) -> None:
        self.process.start()
        eventually(lambda: "Server is ready" in self.process.output())


def agrees(answer: Answer, engine: Engine) -> bool:
    """An engine computes the last token itself even when all is cached: up to a block lies between the two."""
    return abs(answer.predicted - answer.reported) <= engine.block


def predictions(router: Router, engine: Engine, prompts: Iterable[Any]) -> tuple[int, list[tuple[int, int, int]]]:
    """One completion of each prompt after the other: the cached tokens predicted in all, and of each wrong prediction
    the length of its prompt, what was predicted and what the engine found."""
    predicted, wrong = 0, []
    for prompt in prompts:
        answer = router.ask({"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True})
        assert answer.status == 200
        predicted += answer.predicted
        if not agrees(answer, engine):
            wrong.append((len(prompt), answer.predicted, answer.reported))
        time.sleep(ON_THE_WAY)
    return predicted, wrong
