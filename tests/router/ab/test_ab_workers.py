"""Workers whose caches are emptied before each mode, and those that keep theirs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.ab import workers
from router.ab.workers import reset_caches
from router.security.worker_access import WorkerAccess

from .conftest import Serve
from .streams import plain

NO_SUCH_PATH = plain(b"404 Not Found", b"")
BUSY_VLLM, IDLE_VLLM = (plain(b"200 OK", b'{"success":%s}' % told) for told in (b"false", b"true"))
OLDER_VLLM = plain(b"200 OK", b"")
BUSY_SGLANG, IDLE_SGLANG = plain(b"400 Bad Request", b"Flush cache failed.\n"), plain(b"200 OK", b"Cache flushed.\n")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_AGAIN", 0)


VLLM, SGLANG = b"/reset_prefix_cache", b"/flush_cache"


class Worker:
    """Answers a reset at `path` by each of `answers` in turn, and from then on by the last."""

    def __init__(self, path: bytes, *answers: bytes) -> None:
        self._path = path
        self._answers = list(answers)
        self.asked: list[bytes] = []
        self.completions: list[Any] = []

    async def answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        target, reply = head.split()[1], NO_SUCH_PATH
        if target == b"/v1/completions":
            self.completions.append(json.loads(body))
        if target.partition(b"?")[0] == self._path:
            self.asked.append(target)
            reply = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        writer.write(reply.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        await writer.drain()


async def refuses(worker: Worker, serve: Serve) -> bool:
    address = await serve(worker.answer)
    return await reset_caches([address.url], WorkerAccess(), "m") == [address.url]


@pytest.mark.parametrize(("path", "answer"), [(VLLM, IDLE_VLLM), (VLLM, OLDER_VLLM), (SGLANG, IDLE_SGLANG)])
async def test_a_worker_that_empties_its_cache_is_asked_once(path: bytes, answer: bytes, serve: Serve) -> None:
    worker = Worker(path, answer)
    assert not await refuses(worker, serve)
    assert len(worker.asked) == 1


@pytest.mark.parametrize(("path", "busy", "idle"), [(VLLM, BUSY_VLLM, IDLE_VLLM), (SGLANG, BUSY_SGLANG, IDLE_SGLANG)])
async def test_a_busy_worker_is_asked_again(path: bytes, busy: bytes, idle: bytes, serve: Serve) -> None:
    worker = Worker(path, busy, busy, idle)
    assert not await refuses(worker, serve)
    assert len(worker.asked) == 3


@pytest.mark.parametrize(("path", "busy"), [(VLLM, BUSY_VLLM), (SGLANG, BUSY_SGLANG)])
async def test_a_worker_that_stays_busy_has_refused(path: bytes, busy: bytes, serve: Serve) -> None:
    """vLLM answers 200 also then."""
    assert await refuses(Worker(path, busy), serve)


async def test_a_worker_without_such_a_path_has_refused_at_once(serve: Serve) -> None:
    worker = Worker(VLLM, NO_SUCH_PATH)
    assert await refuses(worker, serve)
    assert len(worker.asked) == 1


async def test_what_left_the_gpu_is_emptied_too(serve: Serve) -> None:
    """vLLM would load it back for the next mode."""
    worker = Worker(VLLM, IDLE_VLLM)
    assert not await refuses(worker, serve)
    assert worker.asked == [b"/reset_prefix_cache?reset_external=true"]


@pytest.mark.parametrize(
    ("path", "answers", "steps"),
    [
        (VLLM, [BUSY_VLLM, IDLE_VLLM], [{"model": "m", "prompt": [10], "max_tokens": 1}]),
        (VLLM, [NO_SUCH_PATH], []),
        (SGLANG, [IDLE_SGLANG], []),
    ],
)
async def test_vllm_makes_a_step_once_it_is_empty(
    path: bytes, answers: list[bytes], steps: list[Any], serve: Serve
) -> None:
    """It publishes with it that its cache is empty, SGLang at once (tests/engines/sim/test_sim_events.py)."""
    worker = Worker(path, *answers)
    await refuses(worker, serve)
    assert worker.completions == steps
