"""What goes over the wire to Dynamo's selection service and what comes back (pure), as ai-dynamo 1.6.1 has it."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from router.ab.errors import RunError

_T = TypeVar("_T")


class Worker(msgspec.Struct, frozen=True):
    """A worker of one rank, as the service is told of it: POST /workers, answered with 201."""

    worker_id: int
    model_name: str
    endpoint: str
    block_size: int
    kv_events_endpoint: str
    replay_endpoint: str | None = None
    total_kv_blocks: int | None = None


class _Overlap(msgspec.Struct):
    gpu: int


class Selection(msgspec.Struct):
    """The service's choice. `endpoint` is the worker's as it was registered, `overlap.gpu` the tokens it has cached."""

    worker_id: int
    endpoint: str
    isl_tokens: int
    overlap: _Overlap


class _Listed(msgspec.Struct):
    endpoint: str | None
    not_schedulable_reasons: tuple[str, ...] = ()


class Ready(msgspec.Struct):
    """GET /ready; workers that cannot be chosen say why."""

    schedulable_workers: int
    workers: tuple[_Listed, ...]

    def reasons(self) -> str:
        return "; ".join(f"{one.endpoint}: {', '.join(one.not_schedulable_reasons)}" for one in self.workers)


class _Score(msgspec.Struct):
    worker_id: int
    device_blocks: int


class _Scores(msgspec.Struct):
    workers: tuple[_Score, ...]


def registration(worker: Worker) -> bytes:
    return msgspec.json.encode(worker)


def selection(name: str, model: str, body: bytes) -> bytes:
    """POST /select_and_reserve for a completion request whose prompt, a list of token ids, ends `body`."""
    prompt = body.rpartition(b'"prompt":')[2]
    fields = (msgspec.json.encode(name), msgspec.json.encode(model))
    return b'{"selection_id":%b,"model_name":%b,"token_ids":' % fields + prompt


def overlap_query(model: str, tokens: list[int]) -> bytes:
    """POST /overlap_scores: who holds how much of a prompt."""
    return msgspec.json.encode({"model_name": model, "token_ids": tokens})


def prefill_complete(name: str) -> str:
    """To POST to when the first byte of the answer is there."""
    return f"/reservations/{name}/prefill_complete"


def reservation(name: str) -> str:
    """To DELETE when the answer has ended."""
    return f"/reservations/{name}"


def read_selection(answer: bytes) -> Selection:
    return _read(answer, Selection)


def read_ready(answer: bytes) -> Ready:
    return _read(answer, Ready)


def cached_blocks(answer: bytes, worker: int) -> int:
    """Of an /overlap_scores answer: the blocks that `worker` holds."""
    return sum(row.device_blocks for row in _read(answer, _Scores).workers if row.worker_id == worker)


def _read(answer: bytes, form: type[_T]) -> _T:
    try:
        return msgspec.json.decode(answer, type=form)
    except msgspec.DecodeError as error:
        text = answer[:300].decode(errors="replace")
        raise RunError(f"the selection service speaks another version of its API: {error}; it said {text}") from None
