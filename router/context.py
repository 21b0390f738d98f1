"""What all requests are routed by, and what routing knows of one prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from indexer.hashing import SequenceHashes, Tokens, pack_tokens
from indexer.kv_indexer import KVIndexer, PromptHashes, hash_prompt
from indexer.matches import Matches, MostOfMatches
from indexer.types import Namespace, WorkerRank
from router.events.index_audit import IndexAudit
from router.events.missing_events import MissingEvents
from router.metrics.registry import Metrics
from router.outage import Outage
from router.processes.sent import SentPrompts
from router.retry_budget import RetryBudget
from router.scheduling.load import LoadBook
from router.scheduling.others import ALONE, Others
from router.scheduling.queue import Queue
from router.scheduling.scheduler import Scheduler
from router.workers.fleet import Fleet


class Prompt(NamedTuple):
    """What is known of a prompt. `hashes` None: the index is not asked; `tokens` may then be an estimate, or 0."""

    tokens: int = 0
    hashes: PromptHashes | None = None
    ids: Tokens | None = None
    """Kept only where a shared store will be asked: with the namespace they decide what its blocks are called there."""
    namespace: Namespace = Namespace()
    guessed: bool = False
    """Tokens and hashes are those of stand-ins (see the glossary)."""
    begins: PromptHashes | None = None
    """Of the tokens, as far as they are known, of a prompt that is `guessed` as a whole."""
    others: Others = ALONE
    """All else is about its first prompt."""


UNKNOWN: Final = Prompt()


class RouterContext(NamedTuple):
    """The parts of a router that each request passes or asks."""

    fleet: Fleet
    book: LoadBook
    scheduler: Scheduler
    queue: Queue
    indexer: KVIndexer
    metrics: Metrics
    clock: Callable[[], float]
    retries: RetryBudget
    leg_timeout: float = 300.0
    """Seconds that either part of a split request may take until it begins to answer."""
    has_store: bool = False
    """Whether the workers share a store."""
    audit: IndexAudit | None = None
    missing_events: MissingEvents | None = None
    outage: Outage | None = None
    """None: a request for which no worker is up is refused at once."""
    sent: SentPrompts | None = None
    """What this process and the others on its port have sent where."""

    def hash_prompt(self, token_ids: Sequence[int] | Tokens, namespace: Namespace) -> Prompt:
        """Raises OverflowError or TypeError for anything that is not a token id."""
        hashes = hash_prompt(token_ids, self.fleet.block_sizes, namespace)
        if not self.has_store:
            return Prompt(len(token_ids), hashes)
        return Prompt(len(token_ids), hashes, pack_tokens(token_ids), namespace)

    def guess_prompt(self, stand_ins: Tokens, namespace: Namespace) -> Prompt:
        """The same for a prompt whose tokens cannot be known, by its stand-ins."""
        return Prompt(len(stand_ins), hash_prompt(stand_ins, self.fleet.block_sizes, namespace), guessed=True)

    def matches(self, prompt: Prompt) -> Matches | None:
        if prompt.hashes is None:
            return None
        self.apply_sent()
        self.indexer.expire(self.clock())
        if not prompt.guessed:
            return self.indexer.find_matches(prompt.hashes)
        assumed = self.indexer.find_assumed(prompt.hashes)
        return MostOfMatches(self.indexer.find_matches(prompt.begins), [assumed]) if prompt.begins else assumed

    def apply_sent(self) -> None:
        """Apply to the index what other processes on this port have sent where."""
        if self.sent:
            for rank, chain, guessed, refused in self.sent.news():
                if refused:
                    self.indexer.retract(rank, chain, guessed)
                else:
                    self._expect(rank, chain, guessed)

    def predict(self, rank: WorkerRank, chain: SequenceHashes, guessed: bool) -> None:
        """Count the blocks that a prompt will leave at `rank` as held at once, here and in the other processes."""
        self._expect(rank, chain, guessed)
        if self.sent:
            self.sent.tell(rank, chain, guessed=guessed)

    def retract(self, rank: WorkerRank, chain: SequenceHashes, guessed: bool) -> None:
        """Undo `predict` for these blocks: the worker has refused the prompt."""
        self.indexer.retract(rank, chain, guessed)
        if self.sent:
            self.sent.tell(rank, chain, guessed=guessed, refused=True)

    def _expect(self, rank: WorkerRank, chain: SequenceHashes, guessed: bool) -> None:
        note = self.indexer.assume if guessed else self.indexer.predict
        note(rank, chain, self.clock())
