"""Keeps the batches of one (worker, dp_rank) in order: a state machine without I/O.

Every stimulus (a batch, a load report, the end of a replay, a reconnect, a tick of the clock) returns instructions in
order. Batches that come too early wait. A gap leads to a replay request, which is answered with the missing batches or
with a snapshot. A greater epoch means that the worker has started with an empty cache. Other ranks are never touched.

Epochs are wall clock times, and clocks may be set back: a smaller epoch is accepted once the greater one is silent and
the publisher that answers for the rank has the smaller.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from indexer.events import NO_EVENTS, Cleared, EventBatch, LoadReport, ReplayRequest
from indexer.types import WorkerRank

MAX_EARLY_BATCHES = 4096
"""Batches held back during a replay: some seconds of a busy engine (one batch per step). Further ones are dropped,
which makes a gap like any other."""

SILENCE = 10
"""Ticks (seconds) without a report after which a rank is in doubt: as long as a load report is valid. Publishers report
every second, or up to two seconds later while an engine is slow to tell its load."""
_LONGEST_GAP = 60
"""Longest interval between reports, in ticks, that counts as a publisher's own pace; it is silent after three of
them."""
_MOST_RIVALS = 5
"""Reports of another epoch, between two of this one, that show a second publisher: late messages of one that has ended
are fewer."""
_MOST_OVER = 8
"""Most epochs remembered as over: a clock is seldom set back twice while messages are on their way."""


class View(enum.Enum):
    """How far the index's picture of one rank can be trusted."""

    EXACT = "exact"
    PARTIAL = "partial"
    """Events are missing, at the publisher or here: what is indexed is right, but incomplete."""
    RECOVERING = "recovering"
    BLIND = "blind"
    """Nothing was ever heard from a publisher of this rank."""


class Apply(NamedTuple):
    batch: EventBatch


class Clear(NamedTuple):
    rank: WorkerRank
    refilled: bool = False
    """A snapshot follows at once, so the rank may still hold what is cleared."""


class AskReplay(NamedTuple):
    request: ReplayRequest


Instruction = Apply | Clear | AskReplay


class Cursor:
    def __init__(self, rank: WorkerRank) -> None:
        self.rank = rank
        self._replays = 0
        """Replays under way, of any epoch."""
        self._gap: int | None = None
        """Ticks between the last two reports; None before the first."""
        self._over: tuple[int, ...] = ()
        """Greater epochs that a smaller one has replaced: messages of theirs may still arrive."""
        self.ticks = 0
        """Since the last report."""
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
        """Messages may have been lost; the next report will tell."""
        self._contested = False
        """Reports of an epoch that seems to be over arrive."""
        self._rivals = 0
        """How many, between two reports of this epoch."""
        self._torn = False
        """A snapshot has begun and is incomplete, or something was assumed: only a whole one makes it right."""
        self._anew = False
        """What is indexed is wrong: a snapshot must come."""
        self._relearning = self._incomplete = False
        self._heard = False
        """A report of this epoch has come."""
        self._foreign = False
        """Nothing that its publisher tells can be used: it is of another version."""

    def __repr__(self) -> str:
        return f"<Cursor {self.rank} epoch {self._epoch} next {self._next_id} {self.view.value}>"

    @property
    def view(self) -> View:
        if self._epoch < 0:
            return View.BLIND
        if self._relearning or self._behind():
            return View.RECOVERING
        return View.EXACT if self._publisher_exact and not self._incomplete else View.PARTIAL

    def _behind(self) -> bool:
        """Whether the publisher may have told what is not here."""
        missing = self._asking or bool(self._early) or self._torn or self._missed >= self._next_id
        return missing or self._doubted or self._contested or self._anew or self._foreign

    @property
    def reported(self) -> bool:
        """Whether reports come, at their publisher's own pace."""
        return self._gap is not None and self.ticks <= max(SILENCE, 3 * self._gap)

    @property
    def forsaken(self) -> bool:
        """Whether nobody has spoken for the rank for a while, so that no events will soon tell what it is sent now. A
        snapshot that is coming speaks, and what is added to it would pass for told."""
        return self._doubted and self.ticks > SILENCE and not self._next_part

    @property
    def torn(self) -> bool:
        """Whether a whole snapshot must replace what is indexed."""
        return self._torn

    @property
    def learns_anew(self) -> bool:
        """Whether all that is told is here, and only what was told before `relearn` is not."""
        return self._relearning and not self._behind()

    @property
    def foreign(self) -> bool:
        """Whether its publisher names blocks in another way than we do."""
        return self._foreign

    @property
    def lacking(self) -> bool:
        """Whether events are missing of which nobody will tell."""
        return self.learns_anew or self._foreign or self.view is View.PARTIAL

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
        if batch.parts:  # parts only come as an answer, even if the request was of another epoch
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

    def on_foreign_batch(self, epoch: int) -> None:
        """A batch came that names blocks in another way than we do, as all of its publisher's do."""
        if epoch == self._epoch:
            self._foreign = True

    def on_report(self, report: LoadReport) -> list[Instruction]:
        """A report names the last batch published before it, so a lost batch is noticed even if no other follows."""
        if report.epoch < self._epoch or report.epoch in self._over:
            return self._on_other_epoch(report)
        if report.epoch == self._epoch and report.event_id < self._mark:
            return []  # late: no sign of life
        fresh = report.epoch > self._epoch or self._doubted
        out = self._enter(report.epoch)
        self._rivals += self._contested
        self._doubted = self._contested = False
        self._note_pace()
        self._publisher_exact = report.exact
        # A report may overtake batches: one is lost if it is still missing at the next report.
        self._missed = report.event_id if fresh else self._mark
        self._mark = report.event_id
        if report.epoch == NO_EVENTS:  # its publisher would answer with what the engine before held
            return out
        behind = self._missed >= self._next_id or bool(self._early or self._torn)
        self._may_ask = True
        return out + self._ask() if behind and not self._foreign else out

    def _note_pace(self) -> None:
        """A report has come. The first of an epoch tells no pace: while nobody published, none came, and a publisher
        that keeps dying would pass for a slow one. It is taken to keep to its predecessor's."""
        if self._gap is None:
            self._gap = 0
        elif self._heard:
            self._gap = min(self.ticks, _LONGEST_GAP)
        self._heard, self.ticks = True, 0

    def on_replay_end(self) -> list[Instruction]:
        """The answer to an AskReplay is complete. What is still missing is asked for at the next report."""
        self._replays = max(0, self._replays - 1)
        if self._replays:
            return []
        self._asking = False
        self._next_part = 0
        self._may_ask = not self._early
        return self.relearn() if self._anew and not self._torn else []

    def on_reconnect(self) -> list[Instruction]:
        """Messages may have been lost without a trace: ask for everything after the last one."""
        if self._epoch < 0:
            return []
        self._doubted = True
        self._may_ask = True
        self._asking = False
        return self._ask()

    def on_worker_restart(self) -> list[Instruction]:
        """The worker came up again: what is indexed may be another process's, unless a publisher is heard, who would
        have told of a new one."""
        return self._enter(NO_EVENTS) if self._doubted else []

    def on_tick(self, connected: bool) -> None:
        """A tick, every second. `connected`: whether the event plane is, as far as known."""
        self.ticks += 1
        silent = self._gap is not None and not self.reported
        if self._epoch >= 0 and (silent or not connected):
            self._doubted = True

    def ask_anew(self) -> list[Instruction]:
        """What is indexed turned out to be wrong: ask for a snapshot, and hold back what comes meanwhile."""
        if self._epoch < 0 or self.view is View.RECOVERING:
            return []  # a recovery is under way already
        self._anew = self._may_ask = True
        return self._ask()

    def assumed(self) -> None:
        """Something is indexed of which no events told."""
        self._torn = True

    def relearn(self) -> list[Instruction]:
        """What is indexed turned out to be wrong, and so is the publisher's view: keep only what comes from now on."""
        self._anew, self._relearning = False, True
        self._next_part = 0  # the rest of a snapshot that has begun would pass for all of it
        return [Clear(self.rank), *self._drain()]

    def relearned(self) -> None:
        """What has come since `relearn` is right; blocks stored before it stay unknown."""
        if self._relearning:
            self._relearning, self._incomplete = False, True

    def _on_other_epoch(self, report: LoadReport) -> list[Instruction]:
        """A late message, or a publisher that started after the clock was set back: once the current one is silent, a
        replay request decides."""
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
        if epoch == NO_EVENTS:
            self._over = ()
        self._begin(epoch)
        return [Clear(self.rank)]

    def _on_snapshot_part(self, batch: EventBatch) -> list[Instruction]:
        unwanted = not self._asking or batch.event_id < self._next_id - 1
        if unwanted or batch.part != self._next_part or (batch.part and batch.event_id != self._snapshot_id):
            return []
        out: list[Instruction] = []
        if batch.part == 0:
            # If the last part never comes, a whole snapshot has to be asked for again.
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
        """All is known of a rank that has cleared its cache."""
        if (self._relearning or self._incomplete) and any(isinstance(event, Cleared) for event in batch.events):
            self._relearning = self._incomplete = False

    def _ask(self) -> list[Instruction]:
        if self._asking or not self._may_ask:
            return []
        self._asking = True
        self._replays += 1
        # No publisher has the epoch NO_EVENTS, so the answer is a snapshot.
        epoch = NO_EVENTS if self._anew or self._torn else self._epoch
        return [AskReplay(ReplayRequest(self.rank.worker_id, self.rank.dp_rank, epoch, self._next_id))]
