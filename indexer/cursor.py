"""Keeps one (worker, dp_rank)'s batches in order: a state machine without I/O.

Every stimulus (a batch, a load report, the end of a replay, a reconnect) returns what to do, in order. Batches that
come too early wait; a gap asks for a replay, which ends in the missing batches or in a snapshot; a greater epoch means
that the worker starts from an empty cache. Other ranks are never touched.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from indexer.events import EventBatch, LoadReport, ReplayRequest
from indexer.types import WorkerRank

MAX_EARLY_BATCHES = 4096
"""Batches held back while a replay is under way: some seconds of a busy engine (one batch a step). Beyond that they are
dropped, which is a gap like any other."""


class View(enum.Enum):
    """How far the index's picture of one rank can be trusted."""

    EXACT = "exact"
    PARTIAL = "partial"
    """The publisher itself missed events that its engine could not replay: what is indexed is right, but not all."""
    RECOVERING = "recovering"
    BLIND = "blind"
    """Nothing was ever heard from a publisher of this rank."""


class Apply(NamedTuple):
    batch: EventBatch


class Clear(NamedTuple):
    rank: WorkerRank
    refilled: bool = False
    """By a snapshot that follows at once: what is cleared may still be held."""


class AskReplay(NamedTuple):
    request: ReplayRequest


Instruction = Apply | Clear | AskReplay


class Cursor:
    def __init__(self, rank: WorkerRank) -> None:
        self.rank = rank
        self._epoch = -1
        self._next_id = 0
        self._early: dict[int, EventBatch] = {}
        self._asking = False
        self._may_ask = True
        self._next_part = 0
        self._snapshot_id = -1
        self._mark = -1
        self._missed = -1
        self._publisher_exact = True

    def __repr__(self) -> str:
        return f"<Cursor {self.rank} epoch {self._epoch} next {self._next_id} {self.view.value}>"

    @property
    def view(self) -> View:
        if self._epoch < 0:
            return View.BLIND
        if self._asking or self._early or self._next_part or self._missed >= self._next_id:
            return View.RECOVERING
        return View.EXACT if self._publisher_exact else View.PARTIAL

    @property
    def epoch(self) -> int:
        """−1 while nothing was heard."""
        return self._epoch

    def on_batch(self, batch: EventBatch) -> list[Instruction]:
        if batch.epoch < self._epoch:
            return []
        out = self._enter(batch.epoch)
        if batch.parts:
            return out + self._on_snapshot_part(batch)
        if batch.event_id < self._next_id:
            return out
        if batch.event_id == self._next_id and not self._next_part:
            return out + self._advance(batch)
        if len(self._early) < MAX_EARLY_BATCHES:
            self._early[batch.event_id] = batch
        return out + self._ask()

    def on_report(self, report: LoadReport) -> list[Instruction]:
        """A report names the last batch published before it, so a batch that got lost in silence is noticed."""
        if report.epoch < self._epoch:
            return []
        fresh = report.epoch > self._epoch
        out = self._enter(report.epoch)
        self._publisher_exact = report.exact
        # A report may overtake batches on its way; one still missing at the next report is lost.
        self._missed = report.event_id if fresh else self._mark
        self._mark = report.event_id
        behind = self._missed >= self._next_id or bool(self._early or self._next_part)
        self._may_ask = True
        return out + self._ask() if behind else out

    def on_replay_end(self) -> list[Instruction]:
        """The answer to the last AskReplay is complete; what is still missing is asked for again at the next report."""
        self._asking = False
        self._next_part = 0
        self._may_ask = not self._early
        return []

    def on_reconnect(self) -> list[Instruction]:
        """Messages may have been lost without a trace: ask for whatever came after the last one."""
        if self._epoch < 0:
            return []
        self._may_ask = True
        self._asking = False
        return self._ask()

    def _enter(self, epoch: int) -> list[Instruction]:
        if epoch == self._epoch:
            return []
        self._epoch = epoch
        self._next_id = 0
        self._early.clear()
        self._asking = False
        self._may_ask = True
        self._next_part = 0
        self._mark = -1
        self._missed = -1
        self._publisher_exact = True
        return [Clear(self.rank)]

    def _on_snapshot_part(self, batch: EventBatch) -> list[Instruction]:
        unwanted = not self._asking or batch.event_id < self._next_id - 1
        if unwanted or batch.part != self._next_part or (batch.part and batch.event_id != self._snapshot_id):
            return []
        out: list[Instruction] = []
        if batch.part == 0:
            # Until the last part is here nothing is known for sure: if it never comes, all must come again.
            self._snapshot_id, self._next_id = batch.event_id, 0
            out.append(Clear(self.rank, refilled=True))
        out.append(Apply(batch))
        self._next_part += 1
        if self._next_part == batch.parts:
            self._next_part = 0
            self._next_id = batch.event_id + 1
            self._early = {early: b for early, b in self._early.items() if early >= self._next_id}
            out += self._drain()
        return out

    def _advance(self, batch: EventBatch) -> list[Instruction]:
        self._next_id += 1
        return [Apply(batch), *self._drain()]

    def _drain(self) -> list[Instruction]:
        out: list[Instruction] = []
        while (batch := self._early.pop(self._next_id, None)) is not None:
            self._next_id += 1
            out.append(Apply(batch))
        return out

    def _ask(self) -> list[Instruction]:
        if self._asking or not self._may_ask:
            return []
        self._asking = True
        return [AskReplay(ReplayRequest(self.rank.worker_id, self.rank.dp_rank, self._epoch, self._next_id))]
