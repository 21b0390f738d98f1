"""One rank of an engine: continuous batching with chunked prefill and prefix caching, as vLLM V1 schedules.

Each step has a budget of tokens. Running requests take theirs first, in order of admission, so decodes (one token each)
precede the chunks of a prefill; what is left admits waiting requests. When blocks run out, the request admitted last
gives up its own and waits again at the front (preemption by recompute). Time enters only as `now`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from engines.sim.cache import BlockId, CacheEvent, PrefixCache
from engines.sim.decoding import Decoding
from engines.sim.timing import StepTiming, StepWork
from indexer.hashing import chain_hashes, pack_tokens, root_hash
from indexer.types import Namespace, SequenceHash

PLAIN = Namespace()


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way to `max_tokens` generated tokens; made by `make_request`."""

    request_id: str
    tokens: list[int]
    """The prompt, and what was generated so far."""
    prompt_length: int
    max_tokens: int
    namespace: Namespace
    hashes: list[SequenceHash]
    """Of the leading full blocks of `tokens`; extended as generated blocks fill."""
    answer_start: int
    """The answer is read from here in the rank's `answers`, cyclically."""
    arrival: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens found in the cache at the first admission."""
    admitted: bool = False
    computed: int = 0
    """Leading tokens whose KV is held."""
    blocks: list[BlockId] = field(default_factory=list)
    stored: int = 0
    """Leading blocks that the cache knows by hash."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def finished(self) -> bool:
        return self.generated >= self.max_tokens


def make_request(
    request_id: str, prompt: list[int], max_tokens: int, block_size: int, namespace: Namespace = PLAIN
) -> Request:
    """Raises OverflowError or TypeError for what is no token id, ValueError for an empty prompt or no token to make.

    The answer depends on the prompt's tokens alone, so a greedy repeat is equal, salted or not.
    """
    if not prompt or max_tokens < 1:
        raise ValueError("an empty prompt, or max_tokens below 1")
    packed = pack_tokens(prompt)
    hashes = chain_hashes(packed, block_size, root_hash(namespace)).tolist()
    return Request(
        request_id=request_id,
        tokens=prompt,
        prompt_length=len(prompt),
        max_tokens=max_tokens,
        namespace=namespace,
        hashes=hashes,
        answer_start=xxhash.xxh3_64_intdigest(packed.tobytes()),
    )


class Emitted(NamedTuple):
    """One generated token."""

    request: Request
    position: int
    """In the answer, from 0."""


class StepOutcome(NamedTuple):
    """What one step did; all of it becomes visible when the step ends, at its start + `duration`."""

    duration: float
    """Seconds."""
    emitted: list[Emitted]
    finished: list[Request]
    events: list[CacheEvent]


class Counters:
    """Totals since the start, in tokens unless they say otherwise."""

    def __init__(self) -> None:
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.finished_requests = 0
        self.aborted_requests = 0
        self.first_tokens = 0
        self.first_token_seconds = 0.0
        self.prefill_tokens = 0
        self.busy_seconds = 0.0


class Scheduler:
    """One rank. `answers` holds the token ids that answers are read from; `slowdown` multiplies every step's time.

    With `decode_blocks_at_finish` generated blocks enter the cache when their request finishes (SGLang), else as they
    fill (vLLM). `emit_every`: tokens at its multiples and the last are emitted; others may be, or cost no time here.
    """

    def __init__(
        self,
        *,
        cache_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        timing: StepTiming = StepTiming(),  # noqa: B008 - frozen
        answers: Sequence[int] = (3,),
        decode_blocks_at_finish: bool = False,
        emit_every: int = 1,
    ) -> None:
        self.cache = PrefixCache(cache_blocks)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.timing = timing
        self.slowdown = 1.0
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.counters = Counters()
        self._answers = answers
        self._decode_blocks_at_finish = decode_blocks_at_finish
        self._requests: dict[str, Request] = {}
        self._blocked: tuple[Request, int] | None = None
        # A step's tokens must always do for all that decode: then a prefill under way is the last of those running.
        apart = emit_every > 1 and max_num_seqs <= max_num_batched_tokens
        self._decoding = Decoding[Request](block_size, emit_every, answers) if apart else None

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting, {self.cache!r}>"

    @property
    def busy(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self.waiting)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def add(self, request: Request, now: float) -> None:
        """Queue a request. ValueError when it can never fit the cache or its id is taken."""
        if self.blocks_for(request.prompt_length + request.max_tokens) > self.cache.capacity:
            raise ValueError("the request needs more blocks than the cache has")
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is already here")
        request.arrival = now
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks; False when it is not here (any more)."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request.blocks)
            if self._decoding:
                self._decoding.leave(request)
        else:
            self.waiting.remove(request)
        self.counters.aborted_requests += 1
        return True

    def waiting_uncached_tokens(self) -> int:
        """Prompt tokens of waiting requests that the cache does not hold now."""
        return sum(len(request.tokens) - len(self._held(request)) * self.block_size for request in self.waiting)

    def step(self, now: float) -> StepOutcome:
        """Compute one step that starts at `now`."""
        if self._decoding and not self.waiting and self._decoding.idle(len(self.running)):
            return self._step_unseen(self._decoding)
        work = StepWork()
        scheduled = self._schedule_decoding(work)
        unseen = work.decode_sequences - len(scheduled)
        self._schedule_running(work, scheduled, work.decode_sequences)
        self._admit(work, scheduled)
        duration = self.timing.step_time(work) * self.slowdown
        self.counters.generated_tokens += unseen
        emitted, finished = self._advance(scheduled, now + duration)
        self.counters.prefill_tokens += work.prefill_tokens
        self.counters.busy_seconds += duration
        return StepOutcome(duration, emitted, finished, self.cache.take_events())

    def _step_unseen(self, decoding: Decoding[Request]) -> StepOutcome:
        """All decode, and nothing else happens: the same as `step`, in a third of the time."""
        work = StepWork(0, 0, len(decoding), decoding.context)
        duration = self.timing.step_time(work) * self.slowdown
        decoding.advance()
        self.counters.generated_tokens += len(decoding)
        self.counters.busy_seconds += duration
        return StepOutcome(duration, [], [], self.cache.take_events())

    def _schedule_decoding(self, work: StepWork) -> list[tuple[Request, int]]:
        """Those that decode apart from the others: of them, the ones that have something to do."""
        decoding = self._decoding
        if not decoding:
            return []
        due = decoding.due()
        if sum(not request.computed % self.block_size for request in due) > self.cache.free_blocks:
            decoding.dissolve()  # blocks run out, and somebody must be preempted
            return []
        work.decode_sequences, work.decode_context = len(decoding), decoding.context
        for request in due:
            self._grow(request, 1)
        return [(request, 1) for request in due]

    def _schedule_running(self, work: StepWork, scheduled: list[tuple[Request, int]], first: int) -> None:
        """Tokens for those running, from `first` on, preempting from the end of the list where blocks run out."""
        budget = self._budget(work)
        index = first
        while index < len(self.running) and budget:
            request = self.running[index]
            new = min(len(request.tokens) - request.computed, budget)
            if self._grow(request, new):
                _count_work(work, request, new)
                scheduled.append((request, new))
                budget -= new
                index += 1
            else:
                self._preempt(self.running.pop())

    def _budget(self, work: StepWork) -> int:
        """Tokens that the step has left."""
        return self.max_num_batched_tokens - work.prefill_tokens - work.decode_sequences

    def _preempt(self, request: Request) -> None:
        self.cache.release(request.blocks)
        request.blocks = []
        request.computed = request.stored = 0
        self.waiting.appendleft(request)
        self.counters.preemptions += 1
        # Its own blocks are free now: admitting it again in this step would only swap places.
        self._blocked = (request, self.cache.free_blocks)

    def _admit(self, work: StepWork, scheduled: list[tuple[Request, int]]) -> None:
        """Waiting requests in order, while budget, seats and blocks for the whole prompt last."""
        budget = self._budget(work)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self._start(request):
                return
            self.waiting.popleft()
            self.running.append(request)
            new = min(len(request.tokens) - request.computed, budget)
            self._grow(request, new)
            _count_work(work, request, new)
            scheduled.append((request, new))
            budget -= new

    def _start(self, request: Request) -> bool:
        """Give a waiting request the blocks it already has in the cache, if the rest of its prompt fits beside them."""
        free = self.cache.free_blocks
        # Looked up afresh only when blocks were freed since it last did not fit: a queue must not cost time every step.
        if self._blocked and self._blocked[0] is request and free <= self._blocked[1]:
            return False
        held = self._held(request)
        if self.blocks_for(len(request.tokens)) - len(held) > free - self.cache.idle(held):
            self._blocked = (request, free)
            return False
        self._blocked = None
        self.cache.acquire(held)
        request.blocks = held
        request.stored = len(held)
        request.computed = len(held) * self.block_size
        self._count_hit(request)
        return True

    def _held(self, request: Request) -> list[BlockId]:
        """Cached leading blocks; never all tokens, for the last one must be computed to predict the next."""
        return self.cache.find(request.hashes[: (len(request.tokens) - 1) // self.block_size])

    def _count_hit(self, request: Request) -> None:
        if request.admitted:
            return
        request.admitted = True
        request.cached_tokens = request.computed
        self.counters.prefix_queries += request.prompt_length
        self.counters.prefix_hits += request.computed
        self.counters.prompt_tokens += request.prompt_length

    def _grow(self, request: Request, new: int) -> bool:
        """Blocks for `new` more tokens, and names for those they fill; False when too few are free."""
        end = request.computed + new
        missing = self.blocks_for(end) - len(request.blocks)
        if missing > 0:
            blocks = self.cache.allocate(missing)
            if blocks is None:
                return False
            request.blocks += blocks
        late = self._decode_blocks_at_finish and end > request.prompt_length
        self._store(request, request.prompt_length if late else end)
        return True

    def _store(self, request: Request, end: int) -> None:
        """Name the full blocks among the first `end` tokens."""
        full = end // self.block_size
        first = request.stored
        if full <= first:
            return
        self._extend_hashes(request, full)
        tokens = request.tokens[first * self.block_size : full * self.block_size]
        parent = request.hashes[first - 1] if first else None
        self.cache.store(request.blocks[first:full], request.hashes[first:full], parent, tokens, request.namespace)
        request.stored = full

    def _extend_hashes(self, request: Request, full: int) -> None:
        known = len(request.hashes)
        if full > known:
            parent = request.hashes[-1] if known else root_hash(request.namespace)
            tokens = request.tokens[known * self.block_size : full * self.block_size]
            request.hashes += chain_hashes(pack_tokens(tokens), self.block_size, parent).tolist()

    def _advance(self, scheduled: list[tuple[Request, int]], end: float) -> tuple[list[Emitted], list[Request]]:
        """Book the step's results: a request whose tokens are all computed makes its next one."""
        emitted: list[Emitted] = []
        finished: list[Request] = []
        answers, length = self._answers, len(self._answers)
        decoding = self._decoding
        if decoding is not None:
            decoding.advance()
        for request, new in scheduled:
            request.computed += new
            if request.computed < len(request.tokens):
                continue
            position = request.generated
            emitted.append(Emitted(request, position))
            request.tokens.append(answers[(request.answer_start + position) % length])
            if position == 0:
                self.counters.first_tokens += 1
                self.counters.first_token_seconds += end - request.arrival
            if request.finished:
                finished.append(request)
            elif decoding is not None:
                decoding.keep(request)
        self.counters.generated_tokens += len(emitted)
        for request in finished:
            self._finish(request)
        return emitted, finished

    def _finish(self, request: Request) -> None:
        if self._decode_blocks_at_finish:
            self._store(request, request.computed)
        self.cache.release(request.blocks)
        self.running.remove(request)
        if self._decoding:
            self._decoding.leave(request)
        del self._requests[request.request_id]
        self.counters.finished_requests += 1


def _count_work(work: StepWork, request: Request, new: int) -> None:
    if new == 1 and request.generated:
        work.add_decode(request.computed + 1)
    else:
        work.add_prefill(request.computed, new)
