"""The recordings in tests/data/recordings, as the engines sent them."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import engines.sglang.decode
import engines.vllm.decode
from engines.events import EngineBatch
from engines.probe import Answer

FOLDER = Path(__file__).parent.parent / "data" / "recordings"


class Recording(NamedTuple):
    name: str
    decode: Callable[[bytes], EngineBatch]
    block_size: int
    stores: int
    removes: int
    """Blocks."""
    skipped: dict[str, int]


RECORDINGS = [
    Recording("vllm-0.32.0", engines.vllm.decode.decode, 32, 95, 153, {}),
    Recording("vllm-0.32.0-mooncake", engines.vllm.decode.decode, 32, 78, 121, {"medium": 92}),
    Recording("sglang-0.5.23", engines.sglang.decode.decode, 16, 23, 259, {}),
    Recording("sglang-0.5.18", engines.sglang.decode.decode, 16, 23, 259, {}),
]


def payloads(name: str) -> list[bytes]:
    lines = (FOLDER / f"{name}.events.jsonl").read_text().splitlines()
    return [bytes.fromhex(json.loads(line)["payload_hex"]) for line in lines]


def exchanges(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.http.json").read_text())
    return [exchange for exchange in found if "request" in exchange]


def answer(name: str, step: str) -> Answer:
    """The recorded answer of the first step that begins so."""
    found = next(exchange for exchange in exchanges(name) if exchange["step"].startswith(step))
    return as_answer(found["response"])


def as_answer(response: dict[str, Any]) -> Answer:
    body = response["body"]
    if response["content_type"] == "application/json":
        return Answer(response["status"], json.dumps(body).encode())
    return Answer(response["status"], ("\n".join(body) + "\n" if isinstance(body, list) else body).encode())


def answers(name: str, load: str = "idle") -> dict[str, Answer]:
    """By path, what the engine answers to each GET; `load` picks a moment: idle, under load, after load."""
    found: dict[str, Answer] = {}
    for exchange in exchanges(name):
        path, step = exchange["request"]["path"], exchange["step"]
        if exchange["request"]["method"] == "GET" and (path not in found or step.endswith(load)):
            found[path] = as_answer(exchange["response"])
    return found


Result = TypeVar("Result")


def drive(steps: Generator[str, Answer, Result], served: dict[str, Answer]) -> tuple[Result, list[str]]:
    """Run a dialogue against fixed answers (404 for every other path); also returns the paths that it asked for."""
    asked: list[str] = []
    try:
        asked.append(next(steps))
        while True:
            asked.append(steps.send(served.get(asked[-1], Answer(404, b'{"detail":"Not Found"}'))))
    except StopIteration as done:
        result: Result = done.value
        return result, asked
