"""What differs between a worker that speaks like vLLM and one that speaks like SGLang: shapes only, no I/O.

Shapes follow recordings of vLLM 0.32.0 and SGLang 0.5.23; fields that say nothing here carry what a stock server says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from engines.sim.cache import CacheEvent
from engines.sim.generation import Refused
from engines.sim.place import Place
from engines.sim.request import Request
from engines.sim.scheduler import Scheduler
from engines.sim.settings import SimSettings

Json = dict[str, Any]
Reading = Callable[[Scheduler], float]
"""What a metric says of a rank."""

HASH_MASK = 0x9E37_79B9_7F4A_7C15
"""Engine hashes are ours with some bits turned, so that whoever takes one for the other is found out."""

BUFFER_STEPS = 10_000
"""Batches kept for replay."""
HIGH_WATER_MARK = 100_000
"""Messages queued for a slow subscriber; both are vLLM's defaults (KVEventsConfig)."""

ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}
"""By status, in the error objects of both engines."""

MARK = "\0"
"""Stands for a chunk's text while its template is made."""
_JSON_MARK = msgspec.json.encode(MARK)


class WorkerFacts(NamedTuple):
    """What a worker says of itself. Ports are 0 where it publishes no events."""

    settings: SimSettings
    topic: str
    event_port: int
    replay_port: int
    created: int
    """Unix time."""
    ranks: Sequence[Scheduler]
    place: Place


class Heading(NamedTuple):
    """What all parts of one answer repeat."""

    answer_id: str
    created: int
    model: str
    chat: bool


class ChoiceResult(NamedTuple):
    text: str
    request: Request
    finish_reason: str
    with_token_ids: bool


class ChunkTemplate(NamedTuple):
    """JSON around the text of one choice's stream chunks, each without the closing brace (usage may come before it)."""

    opening: bytes
    """A whole event before the first token; empty for none."""
    head: bytes
    tail: bytes
    last_tail: bytes
    """In place of `tail` with the last token."""
    closing: bytes
    """A whole event after the last token; empty for none."""
    no_usage: bytes
    """What ends a chunk when it carries no usage."""


class Flavour(ABC):
    """One per worker."""

    decode_blocks_at_finish: ClassVar[bool]
    """Whether the event stream tells of generated blocks when their request ends, not as they fill."""
    clears_at_once: ClassVar[bool]
    """Whether a reset is in the event stream at once, not with the next step."""
    clears_at_start: ClassVar[bool]
    """Whether the event stream begins with a reset, which comes too early for any subscriber."""
    head_at_once: ClassVar[bool]
    """Whether a stream's HTTP head goes out before its first token."""
    reset_path: ClassVar[str]
    reset_methods: ClassVar[Sequence[str]]
    tokenize_paths: ClassVar[Sequence[str]]
    owner: ClassVar[str]
    """Of the models that are served, in their list."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts

    @abstractmethod
    def encode_events(self, timestamp: float, events: Sequence[CacheEvent], dp_rank: int) -> bytes:
        """One message's payload, msgpack."""

    @abstractmethod
    def answer_id(self, chat: bool, request_id: str) -> str: ...

    @abstractmethod
    def chunk_template(self, heading: Heading, choice: int, finish_reason: str) -> ChunkTemplate: ...

    @abstractmethod
    def usage(self, prompt: int, generated: int, cached: int, heading: Heading, streamed: bool) -> Json: ...

    @abstractmethod
    def usage_chunk(self, heading: Heading, usage: Json) -> Json:
        """The event before [DONE] when the client asked for usage."""

    @abstractmethod
    def answer(self, heading: Heading, choices: Sequence[ChoiceResult], usage: Json) -> Json:
        """A whole answer."""

    @abstractmethod
    def error(self, refused: Refused) -> Json: ...

    @abstractmethod
    def streamed_error(self, refused: Refused) -> Json:
        """The event of a stream that fails."""

    def models(self) -> Json:
        settings = self.facts.settings
        base = self._card(settings.model, settings.tokenizer or settings.model, None)
        return {"object": "list", "data": [base, *(self._card(lora, lora, settings.model) for lora in settings.loras)]}

    def _card(self, name: str, root: str, parent: str | None) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self.facts.created,
            "owned_by": self.owner,
            "root": root,
            "parent": parent,
            "max_model_len": None if parent else self.facts.settings.context_length,
        }

    @abstractmethod
    def tokenized(self, tokens: list[int] | list[list[int]]) -> Json: ...

    @abstractmethod
    def cleared(self, done: bool) -> Json | str:
        """What a reset answers; a text comes with status 400 unless it was done."""

    @abstractmethod
    def metrics(self) -> str:
        """Prometheus text."""

    @abstractmethod
    def pages(self, in_flight: int, now: float) -> dict[str, Json]:
        """GET paths that answer JSON, and the answers; `in_flight` HTTP requests are open, `now` is Unix time."""


def split_at_text(chunk: Json) -> tuple[bytes, bytes]:
    """JSON before and after the chunk's MARK, without the closing brace."""
    head, tail = msgspec.json.encode(chunk).split(_JSON_MARK)
    return head, tail[:-1]


def chunk_fields(heading: Heading) -> Json:
    """With which every chunk of a stream begins."""
    kind = "chat.completion.chunk" if heading.chat else "text_completion"
    return {"id": heading.answer_id, "object": kind, "created": heading.created, "model": heading.model}


def token_counts(prompt: int, generated: int) -> Json:
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}


def rank_metrics(
    gauges: dict[str, Reading], counters: dict[str, Reading], labels: Sequence[str], ranks: Sequence[Scheduler]
) -> list[str]:
    """Prometheus lines of every metric for every rank; `labels` are one text, without braces, for each."""
    lines: list[str] = []
    for kind, metrics in (("gauge", gauges), ("counter", counters)):
        for name, read in metrics.items():
            lines.append(f"# TYPE {name} {kind}")
            lines += [f"{name}{{{each}}} {float(read(rank))}" for each, rank in zip(labels, ranks, strict=True)]
    return lines
