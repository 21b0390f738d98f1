"""Keeps one (worker, dp_rank)'s batches in order: a state machine without I/O.

Every stimulus (a batch, a load report, the end of a replay, a reconnect, a look at the clock) returns what to do, in
order. Batches that come too early wait; a gap asks for a replay, which ends in the missing batches or in a snapshot; a
greater epoch means that the worker starts from an empty cache. Other ranks are never touched.

Epochs are made from wall clocks, which may be set back: a smaller one counts once the greater has fallen silent and
whoever answers for the rank has it.
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
"""Looks, a second apart, without a report after which nobody knows what the rank holds: as long as a report of its load
counts. Publishers report every second, later by the two that an engine has to tell its load."""
_LONGEST_GAP = 60
"""Looks between two reports that are taken for a publisher's habit; one that missed two of them is silent."""
_MOST_RIVALS = 5
"""Times that somebody else spoke between two reports: late news of a publisher that has ended is less."""
_MOST_OVER = 8
"""Epochs remembered as being over; a clock is seldom set back twice while messages are under way."""


class View(enum.Enum):
    """How far the index's picture of one rank can be trusted."""

    EXACT = "exact"
    PARTIAL = "partial"
    """The publisher does not have all of its engine's events, or we not all of the publisher's: what is indexed is
    right, but not all."""
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
        self._replays = 0
        """Under way, of whatever epoch."""
        self._gap: int | None = None
        """Looks between the last two reports; None while there was none."""
        self._over: tuple[int, ...] = ()
        """Greater ones that a smaller one followed: news of them may still be under way."""
        self._looks = 0
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
        """The rank may have said things that never came; its next report will tell."""
        self._contested = False
        """Somebody reports for the rank in an epoch that seems to be over."""
        self._rivals = 0
        """Times that this was so between two reports of this epoch."""
        self._torn = False
        """A snapshot has begun and is not complete."""
        self._anew = False
        """What is indexed is not believed: all must come again."""
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
        """−1 while nothing was heard."""
        return self._epoch

    @property
    def rivalled(self) -> bool:
        """Two publishers speak for the rank, again and again."""
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
        """A report names the last batch published before it, so a batch that got lost in silence is noticed."""
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
        """To be called every second. `connected`: to the event plane, as far as that is known."""
        self._looks += 1
        silent = self._gap is not None and self._looks > max(SILENCE, 3 * self._gap)
        if self._epoch >= 0 and (silent or not connected):
            self._doubted = True

    def ask_anew(self) -> list[Instruction]:
        """What is indexed turned out to be wrong: ask for all of it, and let what comes meanwhile wait."""
        if self._epoch < 0 or self.view is View.RECOVERING:
            return []  # it is being put right already
        self._anew = self._may_ask = True
        return self._ask()

    def relearn(self) -> list[Instruction]:
        """What is indexed turned out to be wrong, and the publisher knows no better: only what comes now counts."""
        self._anew, self._relearning = False, True
        return [Clear(self.rank), *self._drain()]

    def relearned(self) -> None:
        """What has come since `relearn` is taken to be right; what is held since before it stays unknown."""
        if self._relearning:
            self._relearning, self._incomplete = False, True

    def _on_other_epoch(self, report: LoadReport) -> list[Instruction]:
        """Late news, or a publisher that began when the clock had been set back: once ours is silent, whoever is asked
        can tell."""
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
        """Of a rank that has cleared its cache all is known."""
        if (self._relearning or self._incomplete) and any(isinstance(event, Cleared) for event in batch.events):
            self._relearning = self._incomplete = False

    def _ask(self) -> list[Instruction]:
        if self._asking or not self._may_ask:
            return []
        self._asking = True
        self._replays += 1
        # Nobody has an epoch of that number, so the answer is a snapshot.
        epoch = NO_EVENTS if self._anew or self._torn else self._epoch
        return [AskReplay(ReplayRequest(self.rank.worker_id, self.rank.dp_rank, epoch, self._next_id))]
