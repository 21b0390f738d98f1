"""The index as the router uses it: cursors put events in order, the prefix index answers which ranks hold a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from indexer.assumed import AssumedPrefixes, Dropped
from indexer.cursor import Apply, Clear, Cursor, Instruction, View
from indexer.events import Cleared, EventBatch, LoadReport, Removed, ReplayRequest, Stored, unpack_hashes
from indexer.hashing import HASH_VERSION, SequenceHashes, Tokens, chain_hashes, pack_tokens, root_hash
from indexer.kernels import NO_SECRET
from indexer.matches import Matches, MostOfMatches, SumOfMatches
from indexer.observer import Cause, Observer
from indexer.predicted import PredictedPrefixes
from indexer.prefix_index import PrefixIndex
from indexer.removals import Removals
from indexer.types import Namespace, Tier, WorkerRank


class PromptHashes(NamedTuple):
    """A prompt's sequence hashes, one chain per distinct block size (in tokens) of the fleet."""

    tokens: int
    chains: dict[int, SequenceHashes]

    def chain(self, block_size: int) -> SequenceHashes:
        """Empty for a size that no worker had when the prompt was hashed."""
        return self.chains.get(block_size, _EMPTY)


_EMPTY: SequenceHashes = np.empty(0, np.uint64)


def hash_prompt(tokens: Sequence[int] | Tokens, block_sizes: Iterable[int], namespace: Namespace) -> PromptHashes:
    """Raises OverflowError or TypeError for anything that is not a token id."""
    packed = pack_tokens(tokens)
    root = root_hash(namespace)
    return PromptHashes(len(tokens), {size: chain_hashes(packed, size, root) for size in set(block_sizes)})


FATES = ("applied", "stale", "unknown_worker", "other_hash_version", "malformed")
_ASSUMED_SHARE = 4
"""One part in so many of an index's memory is for remembering which of its blocks were assumed, and when."""
_GUESSED_SHARE = 8
"""One part in so many of all memory is for the second index, `KVIndexer._guesses`."""


class KVIndexer:
    """Only watched ranks are indexed; batches of others are counted and dropped."""

    def __init__(
        self,
        assumed_ttl: float = 120.0,
        max_bytes: int | None = None,
        observer: Observer | None = None,
        secret: int = NO_SECRET,
    ) -> None:
        """`assumed_ttl`: seconds for which a worker without events, whose cache's size is unknown, is assumed to hold
        a prompt that it was sent.

        `max_bytes`: for both indexes and the assumptions together; `indexer.packed` says what is dropped first.
        `secret`: see `PrefixIndex`; with the same one, and the same events, everything is the same again.
        """
        guessed = None if max_bytes is None else max_bytes // _GUESSED_SHARE
        # What events tell, and of ranks without events, what is assumed (`_assumed` remembers which, and when).
        self.index, self._assumed = _with_room(
            assumed_ttl, None if max_bytes is None else max_bytes - (guessed or 0), secret
        )
        # A second index of assumptions alone (`_guessed` remembers when), which must not mix with what events tell:
        # prompts whose hashes are those of stand-ins, and what `_lacking` ranks were sent.
        self._guesses, self._guessed = _with_room(assumed_ttl, guessed, secret)
        self.counts: Counter[str] = Counter()
        """Batches by fate, one of `FATES`."""
        self.removals = Removals()
        self._predicted = PredictedPrefixes(secret=secret)
        self._lacking: set[WorkerRank] = set()
        """Ranks of which events are missing or cannot be used, and which were sent prompts meanwhile: those prompts are
        assumed to be there, in `_guesses`."""
        self._cursors: dict[WorkerRank, Cursor] = {}
        self._observer = observer

    @property
    def nbytes(self) -> int:
        """Never more than `max_bytes`."""
        return sum(part.nbytes for part in (self.index, self._assumed, self._guesses, self._guessed))

    @property
    def evicted(self) -> int:
        """(rank, tier, block) entries dropped for lack of memory since the start."""
        return sum(part.evicted for part in (self.index, self._assumed, self._guesses, self._guessed))

    @property
    def refused(self) -> int:
        """(rank, tier, block) entries not stored for lack of memory since the start."""
        return self.index.refused + self._guesses.refused

    def watch(self, rank: WorkerRank) -> None:
        """Index this rank from now on; watching it again changes nothing."""
        self._cursors.setdefault(rank, Cursor(rank))

    def resize(self, rank: WorkerRank, blocks: int | None) -> None:
        """The rank's cache has room for so many blocks; None: it does not say, whatever the engine before it said."""
        self._tell_expired(self._assumed.resize(rank, blocks))
        self._guessed.resize(rank, blocks)

    def forget(self, rank: WorkerRank) -> None:
        self._cursors.pop(rank, None)
        self.clear(rank)
        self._assumed.forget(rank)
        self._guessed.forget(rank)
        self.removals.drop(rank)

    def watches(self, rank: WorkerRank) -> bool:
        return rank in self._cursors

    def clear(self, rank: WorkerRank) -> None:
        """Drop all that is indexed for `rank`, known or assumed."""
        self._tell_dropped(rank, "expired")
        self._drop(rank)

    def _drop(self, rank: WorkerRank) -> None:
        self._guessed.clear(rank)
        self._lacking.discard(rank)
        self._drop_told(rank)

    def _make_way(self, rank: WorkerRank) -> None:
        """For a snapshot of what `rank` holds. It has not dropped anything itself, so what stands for prompts without
        tokens stays: no snapshot tells of that."""
        if rank in self._lacking:  # what was assumed beside events goes, and cannot be told from the others
            self._drop(rank)
        else:
            self._drop_told(rank)

    def _drop_told(self, rank: WorkerRank) -> None:
        """Drop all but `_guesses`."""
        self._assumed.clear(rank)
        self._predicted.forget(rank)
        self.removals.forget(rank)
        self.index.clear(rank)

    def _tell_dropped(self, rank: WorkerRank, cause: Cause) -> None:
        if self._observer:
            self._observer.dropped(rank, self.index.blocks_by_tier(rank), cause)

    def _tell_expired(self, dropped: Dropped) -> None:
        if dropped and self._observer:
            for rank, blocks in dropped.items():
                self._observer.dropped(rank, {Tier.GPU: len(blocks)}, "expired")

    def worker_restarted(self, rank: WorkerRank) -> None:
        """Its process may be a new one with an empty cache, so what was only assumed of it is dropped, and what is
        known where no publisher would have told."""
        if self.view(rank) is View.BLIND:
            self.clear(rank)
        self._stimulate(rank, Cursor.on_worker_restart)

    def predict(self, rank: WorkerRank, chain: SequenceHashes, now: float) -> None:
        """`rank` was sent a prompt with these hashes and will hold it. That is believed for as long as its events may
        take to come. Where they will not come (the rank has none, some are missing or cannot be used, or its publisher
        is silent), it is believed until the rank's cache has no more room, or for `assumed_ttl`. `now`: seconds on a
        steady clock."""
        cursor = self._cursors.get(rank)
        if cursor and cursor.view is not View.BLIND:
            self._predicted.store(rank, chain, now, self.index.windows(rank))
            if cursor.lacking:  # a block cannot be placed whose parent's event was missed, however often it is sent
                self._lacking.add(rank)
                self._guessed.assume(rank, chain, now)
            if not cursor.forsaken:
                return
            cursor.assumed()
        self._tell_expired(self._assumed.assume(rank, chain, now))

    def assume(self, rank: WorkerRank, chain: SequenceHashes, now: float) -> None:
        """The same for a prompt whose hashes are those of stand-ins, so that no events will report it. It is kept
        apart, so that the index of a rank with events holds what they say and nothing else."""
        self._guessed.assume(rank, chain, now)

    def retract(self, rank: WorkerRank, chain: SequenceHashes, guessed: bool) -> None:
        """`rank` never started on the prompt of which these blocks were predicted (assumed, if `guessed`)."""
        if guessed:
            self._guessed.retract(rank, chain)
            return
        cursor = self._cursors.get(rank)
        self._predicted.remove(rank, chain)
        if rank in self._lacking:
            self._guessed.retract(rank, chain)
        # Of a silent rank, only once something was assumed: before, these are blocks that events told of once for all.
        if cursor is None or cursor.view is View.BLIND or (cursor.forsaken and cursor.torn):
            self._assumed.retract(rank, chain)

    def expire(self, now: float) -> None:
        """Drop assumptions and predictions that are too old."""
        self._tell_expired(self._assumed.expire(now))
        self._guessed.expire(now)
        self._predicted.expire(now)

    def view(self, rank: WorkerRank) -> View:
        cursor = self._cursors.get(rank)
        return cursor.view if cursor else View.BLIND

    def reported(self, rank: WorkerRank) -> bool:
        """Whether load reports of the rank come."""
        cursor = self._cursors.get(rank)
        return cursor is not None and cursor.reported

    def learns_anew(self, rank: WorkerRank) -> bool:
        """Whether the rank's publisher is heard, and what it told before `relearn` is all that is not known."""
        cursor = self._cursors.get(rank)
        return cursor is not None and cursor.learns_anew

    def foreign(self, rank: WorkerRank) -> bool:
        """Whether the rank's publisher names blocks in another way than we do, as one of another version may."""
        cursor = self._cursors.get(rank)
        return cursor is not None and cursor.foreign

    def find_matches(self, prompt: PromptHashes) -> Matches:
        """The overlap of each rank that holds the prompt's first block, in blocks of the rank's own size."""
        return _together([self._find(chain) for chain in prompt.chains.values()])

    def find_assumed(self, prompt: PromptHashes) -> Matches:
        """The same for a prompt whose hashes are those of stand-ins."""
        return _together([self._guesses.find_matches(chain) for chain in prompt.chains.values()])

    def _find(self, chain: SequenceHashes) -> Matches:
        known, others = self.index.find_matches(chain), self._predicted.find_matches(chain)
        assumed = self._guesses.find_on_gpu(chain) if self._lacking else None
        if assumed is not None:
            others.append(assumed)
        return MostOfMatches(known, others) if others else known

    def on_batch(self, batch: EventBatch) -> list[ReplayRequest]:
        """Apply a batch, or hold it back; returns the replays to ask for."""
        cursor = self._cursors.get(batch.rank)
        fate = _refusal(batch) if cursor else "unknown_worker"
        if fate or cursor is None:
            self.counts[fate] += 1
            if cursor and fate == "other_hash_version":
                cursor.on_foreign_batch(batch.epoch)
            return []
        instructions = cursor.on_batch(batch)
        if not instructions:
            self.counts["stale"] += 1
        return self._carry_out(cursor.rank, instructions)

    def on_report(self, report: LoadReport) -> list[ReplayRequest]:
        asks = self._stimulate(report.rank, lambda cursor: cursor.on_report(report))
        if report.rank in self._lacking and self.view(report.rank) is View.EXACT:
            self._lacking.discard(report.rank)
            self._guessed.clear(report.rank)
        return asks

    def on_replay_end(self, rank: WorkerRank) -> list[ReplayRequest]:
        """Also when the replay failed or nobody answered."""
        return self._stimulate(rank, Cursor.on_replay_end)

    def on_reconnect(self) -> list[ReplayRequest]:
        """The event plane is connected again. Returns the replays to ask for, in this order: first those of the ranks
        heard of last. Other publishers may be gone, which the broker may not know yet, and each of those takes its time
        not to answer."""
        ranks = sorted(self._cursors, key=lambda rank: self._cursors[rank].ticks)
        return [ask for rank in ranks for ask in self._stimulate(rank, Cursor.on_reconnect)]

    def on_tick(self, connected: bool) -> None:
        """To be called every second. `connected`: whether the event plane seems to be connected."""
        for cursor in self._cursors.values():
            cursor.on_tick(connected)

    def rivalled(self) -> list[WorkerRank]:
        """Ranks for which two publishers send events."""
        return [rank for rank, cursor in self._cursors.items() if cursor.rivalled]

    def ask_anew(self, rank: WorkerRank) -> list[ReplayRequest]:
        """What is indexed of `rank` turned out to be wrong: ask its publisher for everything again."""
        return self._stimulate(rank, Cursor.ask_anew)

    def relearn(self, rank: WorkerRank) -> None:
        """It is wrong, and so is the publisher's snapshot: forget it, and learn from the batches to come."""
        self._stimulate(rank, Cursor.relearn)

    def relearned(self, rank: WorkerRank) -> None:
        """What has come since `relearn` turned out to be right."""
        cursor = self._cursors.get(rank)
        if cursor:
            cursor.relearned()

    def _stimulate(self, rank: WorkerRank, stimulus: Callable[[Cursor], list[Instruction]]) -> list[ReplayRequest]:
        cursor = self._cursors.get(rank)
        return self._carry_out(rank, stimulus(cursor)) if cursor else []

    def _carry_out(self, rank: WorkerRank, instructions: list[Instruction]) -> list[ReplayRequest]:
        asks = []
        for instruction in instructions:
            match instruction:
                case Apply(batch):
                    self.counts["applied"] += 1
                    self._apply(rank, batch)
                case Clear(_, refilled):
                    (self._make_way if refilled else self.clear)(rank)
                case _:
                    asks.append(instruction.request)
        return asks

    def _apply(self, rank: WorkerRank, batch: EventBatch) -> None:
        observer = None if batch.parts or batch.past else self._observer
        for event in batch.events:
            if isinstance(event, Cleared):
                if observer:
                    self._tell_dropped(rank, "cleared")
                self._drop(rank)
                continue
            hashes = unpack_hashes(event.hashes)
            if event.window:
                self._apply_window(rank, event, hashes)
            elif isinstance(event, Stored):
                created = self.index.store(rank, event.tier, hashes)
                if observer:
                    observer.stored(rank, event.tier, hashes, created)
            else:
                self.index.remove(rank, event.tier, hashes)
                self.removals.note(rank, hashes)
                if event.tier is Tier.GPU:
                    self._take_back(rank, hashes)
                if observer:
                    observer.removed(rank, event.tier, hashes)

    def _apply_window(self, rank: WorkerRank, event: Stored | Removed, hashes: SequenceHashes) -> None:
        if isinstance(event, Stored):
            self.index.store_window(rank, event.window, hashes)
        else:
            self.index.remove_window(rank, event.window, hashes)
            self.removals.note(rank, hashes)
            self._take_back(rank, hashes)

    def _take_back(self, rank: WorkerRank, hashes: SequenceHashes) -> None:
        """`rank` has just said that it does not hold these, whatever it was sent."""
        self._predicted.remove(rank, hashes)
        if rank in self._lacking:
            self._guessed.retract(rank, hashes)


def _with_room(assumed_ttl: float, max_bytes: int | None, secret: int) -> tuple[PrefixIndex, AssumedPrefixes]:
    """An index and the assumptions that it holds, both within `max_bytes`."""
    assumed = None if max_bytes is None else max_bytes // _ASSUMED_SHARE
    index = PrefixIndex(None if max_bytes is None else max_bytes - (assumed or 0), secret)
    return index, AssumedPrefixes(index, assumed_ttl, assumed, secret)


def _together(found: list[Matches]) -> Matches:
    return found[0] if len(found) == 1 else SumOfMatches(found)


def _refusal(batch: EventBatch) -> str:
    """Why a batch cannot be used; "" when it can. Checked whole, so that a bad batch is not half applied."""
    if batch.hash_version != HASH_VERSION:
        return "other_hash_version"
    sound = batch.epoch >= 0 and batch.event_id >= (-1 if batch.parts else 0) and 0 <= batch.part <= batch.parts
    whole = all(isinstance(event, Cleared) or len(event.hashes) % 8 == 0 for event in batch.events)
    return "" if sound and whole else "malformed"
