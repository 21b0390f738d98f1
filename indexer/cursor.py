"""Keeps one (worker, dp_rank)'s batches in order: a state machine without I/O.

Every stimulus (a batch, a load report, the end of a replay, a reconnect, a tick of the clock) returns what to do, in
order. Batches that come too early wait. A gap leads to a request for a replay, which brings the missing batches or a
snapshot. A greater epoch means that the worker has started with an empty cache. Other ranks are never touched.

Epochs are taken from wall clocks, which may be set back. So a smaller epoch is accepted once the greater one has fallen
silent and the publisher that answers for the rank has the smaller.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from indexer.events import NO_EVENTS, Cleared, EventBatch, LoadReport, ReplayRequest
from indexer.types import WorkerRank

MAX_EARLY_BATCHES = 4096
"""Batches held back while a replay is under way: some seconds of a busy engine (one batch a step). Beyond that they are
dropped, which is a gap like any other."""

SILENCE = 10
"""Calls of `on_look`, a second apart, without a report after which what the rank holds is in doubt; a report of its
load counts for as long. Publishers report every second, or two seconds later where the engine is slow to answer."""
_LONGEST_GAP = 60
"""The longest gap between two reports, in calls of `on_look`, that is taken to be the publisher's usual interval; after
three such intervals without a report it counts as silent."""
_MOST_RIVALS = 5
"""How often reports of another publisher must come between those of this one for the two to count as rivals; the last
messages of a publisher that has ended are fewer."""
_MOST_OVER = 8
"""Ended epochs that are remembered; a clock is rarely set back twice while messages are under way."""


class View(enum.Enum):
    """How far the index's picture of one rank can be trusted."""

    EXACT = "exact"
    PARTIAL = "partial"
    """The publisher does not have all of its engine's events, or the router not all of the publisher's: what is indexed
    is right, but incomplete."""
    RECOVERING = "recovering"
    BLIND = "blind"
    """Nothing was ever received from a publisher of this rank."""


class Apply(NamedTuple):
    batch: EventBatch


class Clear(NamedTuple):
    rank: WorkerRank
    refilled: bool = False
    """Whether a snapshot follows at once, so that what is cleared may still be held."""


class AskReplay(NamedTuple):
    request: ReplayRequest


Instruction = Apply | Clear | AskReplay


class Cursor:
    def __init__(self, rank: WorkerRank) -> None:
        self.rank = rank
        self._replays = 0
        """Replays under way, of any epoch."""
        self._gap: int | None = None
        """Calls of `on_look` between the last two reports; None before the first report."""
        self._over: tuple[int, ...] = ()
        """Epochs that a smaller one has replaced: messages of them may still be under way."""
        self._looks = 0
        """Calls of `on_look` since the last report."""
        self._begin(NO_EVENTS)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_id = 0
        self._early: dict[int, EventBatch] = {}
        self._asking = False
        self._may_ask = True
        self._next_part = 0
        self._snapshot_id = -1
        self._mark = -1
        self._missed = -1
        self._publisher_exact = True
        self._doubted = False
        """Messages may have been lost; the next report shows whether they were."""
        self._contested = False
        """Reports come in an epoch that seems to be over."""
        self._rivals = 0
        """How often that was so between two reports of this epoch."""
        self._torn = False
        """A snapshot has begun and is not complete."""
        self._anew = False
        """What is indexed is not trusted: everything must be sent again."""
        self._relearning = self._incomplete = False

    def __repr__(self) -> str:
        return f"<Cursor {self.rank} epoch {self._epoch} next {self._next_id} {self.view.value}>"

    @property
    def view(self) -> View:
        if self._epoch < 0:
            return View.BLIND
        behind = self._asking or self._early or self._torn or self._missed >= self._next_id
        if behind or self._doubted or self._contested or self._anew or self._relearning:
            return View.RECOVERING
        return View.EXACT if self._publisher_exact and not self._incomplete else View.PARTIAL

    @property
    def epoch(self) -> int:
        """−1 before anything was received."""
        return self._epoch

    @property
    def rivalled(self) -> bool:
        """Whether two publishers keep speaking for the rank."""
        return self._rivals >= _MOST_RIVALS

    def on_batch(self, batch: EventBatch) -> list[Instruction]:
        asking = self._asking
        if batch.epoch < self._epoch or batch.epoch in self._over:
            if not (batch.parts and asking and self._doubted):
                return []
            over = (*(epoch for epoch in self._over if epoch != batch.epoch), self._epoch)
            self._over = over[-_MOST_OVER:]
        out = self._enter(batch.epoch)
        if batch.parts:  # only ever the answer to a question, even if that was of another epoch
            self._asking = asking
            return out + self._on_snapshot_part(batch)
        if batch.event_id < self._next_id:
            return out
        if batch.event_id == self._next_id and not self._torn and not self._anew:
            self._doubted = False
            return out + self._advance(batch)
        if len(self._early) < MAX_EARLY_BATCHES:
            self._early[batch.event_id] = batch
        return out + self._ask()

    def on_report(self, report: LoadReport) -> list[Instruction]:
        """A report names the last batch published before it, so a lost batch is noticed even if none follows it."""
        if report.epoch < self._epoch or report.epoch in self._over:
            return self._on_other_epoch(report)
        if report.epoch == self._epoch and report.event_id < self._mark:
            return []  # late, and so no sign of life
        fresh = report.epoch > self._epoch or self._doubted
        out = self._enter(report.epoch)
        self._rivals += self._contested
        self._doubted = self._contested = False
        self._gap = 0 if self._gap is None else min(self._looks, _LONGEST_GAP)
        self._looks = 0
        self._publisher_exact = report.exact
        # A report may overtake batches on its way; one still missing at the next report is lost.
        self._missed = report.event_id if fresh else self._mark
        self._mark = report.event_id
        behind = self._missed >= self._next_id or bool(self._early or self._torn)
        self._may_ask = True
        return out + self._ask() if behind else out

    def on_replay_end(self) -> list[Instruction]:
        """The answer to an AskReplay is complete; what is still missing is asked for again at the next report."""
        self._replays = max(0, self._replays - 1)
        if self._replays:
            return []
        self._asking = False
        self._next_part = 0
        self._may_ask = not self._early
        return self.relearn() if self._anew and not self._torn else []

    def on_reconnect(self) -> list[Instruction]:
        """Messages may have been lost without a trace: ask for whatever came after the last one."""
        if self._epoch < 0:
            return []
        self._doubted = True
        self._may_ask = True
        self._asking = False
        return self._ask()

    def on_look(self, connected: bool) -> None:
        """To be called every second. `connected`: whether the event plane seems to be connected."""
        self._looks += 1
        silent = self._gap is not None and self._looks > max(SILENCE, 3 * self._gap)
        if self._epoch >= 0 and (silent or not connected):
            self._doubted = True

    def ask_anew(self) -> list[Instruction]:
        """What is indexed turned out to be wrong: ask for everything again, and hold back what comes meanwhile."""
        if self._epoch < 0 or self.view is View.RECOVERING:
            return []  # it is being put right already
        self._anew = self._may_ask = True
        return self._ask()

    def relearn(self) -> list[Instruction]:
        """What is indexed turned out to be wrong, and the publisher's snapshot is too: forget it all, and learn from
        the batches to come."""
        self._anew, self._relearning = False, True
        return [Clear(self.rank), *self._drain()]

    def relearned(self) -> None:
        """What has come since `relearn` is right. What the rank has held since before stays unknown."""
        if self._relearning:
            self._relearning, self._incomplete = False, True

    def _on_other_epoch(self, report: LoadReport) -> list[Instruction]:
        """Either a late message, or a publisher that started after its clock was set back. Once the present epoch is
        silent, the answer to a replay request tells which."""
        self._contested = self._epoch >= 0
        if not self._doubted:
            return []
        if report.epoch == NO_EVENTS:
            return self._enter(NO_EVENTS)
        self._may_ask = True
        return self._ask()

    def _enter(self, epoch: int) -> list[Instruction]:
        if epoch == self._epoch:
            return []
        self._begin(epoch)
        return [Clear(self.rank)]

    def _on_snapshot_part(self, batch: EventBatch) -> list[Instruction]:
        unwanted = not self._asking or batch.event_id < self._next_id - 1
        if unwanted or batch.part != self._next_part or (batch.part and batch.event_id != self._snapshot_id):
            return []
        out: list[Instruction] = []
        if batch.part == 0:
            # Until the last part is here nothing is known for sure: if it never comes, all must come again.
            self._snapshot_id, self._next_id, self._torn = batch.event_id, 0, True
            out.append(Clear(self.rank, refilled=True))
        out.append(Apply(batch))
        self._next_part += 1
        if self._next_part == batch.parts:
            self._next_part = 0
            self._torn = self._anew = self._relearning = self._incomplete = self._doubted = False
            self._next_id = batch.event_id + 1
            self._early = {early: b for early, b in self._early.items() if early >= self._next_id}
            out += self._drain()
        return out

    def _advance(self, batch: EventBatch) -> list[Instruction]:
        self._next_id += 1
        self._forgive(batch)
        return [Apply(batch), *self._drain()]

    def _drain(self) -> list[Instruction]:
        out: list[Instruction] = []
        while (batch := self._early.pop(self._next_id, None)) is not None:
            self._next_id += 1
            self._forgive(batch)
            out.append(Apply(batch))
        return out

    def _forgive(self, batch: EventBatch) -> None:
        """Once a rank has cleared its cache, everything that it holds is known again."""
        if (self._relearning or self._incomplete) and any(isinstance(event, Cleared) for event in batch.events):
            self._relearning = self._incomplete = False

    def _ask(self) -> list[Instruction]:
        if self._asking or not self._may_ask:
            return []
        self._asking = True
        self._replays += 1
        # There is no epoch of that number, so the answer is a snapshot.
        epoch = NO_EVENTS if self._anew or self._torn else self._epoch
        return [AskReplay(ReplayRequest(self.rank.worker_id, self.rank.dp_rank, epoch, self._next_id))]
