"""One rank of an engine: continuous batching with chunked prefill and prefix caching, as vLLM V1 schedules.

Each step has a budget of tokens. Running requests take theirs first, in order of admission, so decodes (one token each)
precede the chunks of a prefill; what is left admits waiting requests. When blocks run out, the request admitted last
gives up its own and waits again at the front (preemption by recompute). Time enters only as `now`.

Prefill and decode may be on different workers: a `remote` request holds a seat and blocks for its prompt while another
worker's KV is fetched into them, a `keep` request's blocks outlast it until they are let go.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from engines.sim.cache import BlockId, CacheEvent, PrefixCache
from engines.sim.decoding import Decoding
from engines.sim.request import Request
from engines.sim.timing import StepTiming, StepWork
from indexer.hashing import chain_hashes, pack_tokens, root_hash


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
    loading: list[tuple[Request, int]]
    """Remote requests that the step admitted, and how many of their prompt tokens must be fetched; none for 0."""


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
        self.transferred_tokens = 0
        """Of prompts, fetched from other workers."""


class Scheduler:
    """One rank. `answers` holds the token ids that answers are read from; `slowdown` multiplies every step's time.

    With `decode_blocks_at_finish` generated blocks enter the cache when their request finishes (SGLang), else as they
    fill (vLLM). `emit_every`: tokens at its multiples and the last are emitted; others may be, or cost no time here.
    `max_loras`: LoRA adapters that run at once; None: any number.
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
        max_loras: int | None = None,
    ) -> None:
        self.cache = PrefixCache(cache_blocks)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_loras = max_loras
        self.timing = timing
        self.slowdown = 1.0
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.loading: dict[str, Request] = {}
        """Seated, with blocks for the whole prompt, until `loaded`; by request id."""
        self.counters = Counters()
        self.gaps: Counter[float] = Counter()
        """Time between tokens: seconds, to 0.1 ms, and how many tokens followed others that long after. That is a step,
        except for those who missed steps."""
        self._stalled: dict[Request, float] = {}
        """Those whose answer has begun and got no token in the last step: when it got its last."""
        self._answers = answers
        self._decode_blocks_at_finish = decode_blocks_at_finish
        self._requests: dict[str, Request] = {}
        self._kept: dict[str, Request] = {}
        self._blocked: tuple[Request, int] | None = None
        """The waiting request that last did not fit, and how many blocks were free then."""
        # A step's tokens must always do for all that decode: then a prefill under way is the last of those running.
        apart = emit_every > 1 and max_num_seqs <= max_num_batched_tokens
        self._decoding = Decoding(block_size, emit_every, answers) if apart else None

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting, {self.cache!r}>"

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running) or (bool(self.waiting) and self._seats > 0 and not self._is_blocked(self.waiting[0]))

    @property
    def kept(self) -> int:
        """Finished requests whose blocks are held."""
        return len(self._kept)

    @property
    def _seats(self) -> int:
        return self.max_num_seqs - len(self.running) - len(self.loading)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def add(self, request: Request, now: float) -> None:
        """Queue a request. ValueError when it can never fit the cache or its id is taken."""
        if self.blocks_for(request.prompt_length + request.max_tokens) > self.cache.capacity:
            raise ValueError("the request needs more blocks than the cache has")
        if request.request_id in self._requests or request.request_id in self._kept:
            raise ValueError(f"request {request.request_id} is already here")
        request.arrival = now
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks; False when it is not here (any more), as one that is only kept."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._stalled.pop(request, None)
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request.blocks)
            if self._decoding:
                self._decoding.leave(request)
        elif self.loading.pop(request_id, None):
            self.cache.release(request.blocks)
        else:
            self.waiting.remove(request)
        self.counters.aborted_requests += 1
        return True

    def loaded(self, request_id: str, tokens: int | None = None) -> bool:
        """The KV of a loading request's first `tokens` prompt tokens (None: all) is there; False if it does not load.

        It computes the rest from the next step on, and the last token in any case, for its logits.
        """
        request = self.loading.pop(request_id, None)
        if request is None:
            return False
        there = request.prompt_length if tokens is None else max(tokens, request.computed)
        self.counters.transferred_tokens += there - request.computed
        self._store(request, there)
        request.computed = min(there, request.prompt_length - 1)
        self._seat(request)
        return True

    def _seat(self, request: Request) -> None:
        """Before prefills under way, if it has but one token to compute: a step's tokens always do for those."""
        place = len(self.running)
        if len(request.tokens) - request.computed == 1:
            while place and len(self.running[place - 1].tokens) - self.running[place - 1].computed > 1:
                place -= 1
        self.running.insert(place, request)

    def let_go(self, request_id: str) -> bool:
        """Free what a finished request kept; False when it keeps nothing (any more)."""
        request = self._kept.pop(request_id, None)
        if request is None:
            return False
        self.cache.release(request.blocks)
        return True

    def waiting_uncached_tokens(self) -> int:
        """Prompt tokens of waiting requests that the cache does not hold now and no other worker computes."""
        return sum(
            len(request.tokens) - len(self._held(request)) * self.block_size
            for request in self.waiting
            if not _to_fetch(request)
        )

    def step(self, now: float) -> StepOutcome:
        """Compute one step that starts at `now`."""
        if self._decoding and not self.waiting and self._decoding.idle(len(self.running)):
            return self._step_unseen(self._decoding)
        work = StepWork()
        scheduled = self._schedule_decoding(work)
        unseen = work.decode_sequences - len(scheduled)
        self._schedule_running(work, scheduled, work.decode_sequences, now)
        loading = self._admit(work, scheduled)
        # Without a token to compute there is no forward pass, and nothing reads the weights.
        duration = self.timing.step_time(work) * self.slowdown if scheduled or unseen else 0.0
        self.counters.generated_tokens += unseen
        emitted, finished = self._advance(scheduled, now + duration)
        late = self._count_late(emitted, now + duration) if self._stalled else 0
        self._count_gaps(duration, unseen + sum(each.position > 0 for each in emitted) - late)
        self.counters.prefill_tokens += work.prefill_tokens
        self.counters.busy_seconds += duration
        return StepOutcome(duration, emitted, finished, self.cache.take_events(), loading)

    def _count_gaps(self, seconds: float, tokens: int) -> None:
        if tokens:
            self.gaps[round(seconds, 4)] += tokens

    def _count_late(self, emitted: list[Emitted], end: float) -> int:
        """How many of the tokens came later than a step after the one before."""
        late = [self._stalled.pop(each.request) for each in emitted if each.request in self._stalled]
        for last in late:
            self._count_gaps(end - last, 1)
        return len(late)

    def _step_unseen(self, decoding: Decoding) -> StepOutcome:
        """All decode, and nothing else happens: the same as `step`, in a third of the time."""
        work = StepWork(0, 0, len(decoding), decoding.context)
        duration = self.timing.step_time(work) * self.slowdown
        decoding.advance()
        self.counters.generated_tokens += len(decoding)
        self.counters.busy_seconds += duration
        self._count_gaps(duration, len(decoding))
        return StepOutcome(duration, [], [], self.cache.take_events(), [])

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

    def _schedule_running(self, work: StepWork, scheduled: list[tuple[Request, int]], first: int, now: float) -> None:
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
                self._preempt(self.running.pop(), now)
        for request in self.running[index:]:
            self._stall(request, now)

    def _stall(self, request: Request, now: float) -> None:
        if request.generated:
            self._stalled.setdefault(request, now)

    def _budget(self, work: StepWork) -> int:
        """Tokens that the step has left."""
        return self.max_num_batched_tokens - work.prefill_tokens - work.decode_sequences

    def _preempt(self, request: Request, now: float) -> None:
        self._stall(request, now)
        self.cache.release(request.blocks)
        request.blocks = []
        request.computed = request.stored = 0
        self.waiting.appendleft(request)
        self.counters.preemptions += 1
        # Its own blocks are free now: admitting it again in this step would only swap places.
        self._blocked = (request, self.cache.free_blocks)

    def _admit(self, work: StepWork, scheduled: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Waiting requests in order, while budget, seats and blocks for the whole prompt last; who loads how much.
        Those whose adapter does not fit beside the ones that run are overtaken."""
        budget = self._budget(work)
        loading: list[tuple[Request, int]] = []
        overtaken: list[Request] = []
        limit, adapters = self.max_loras, self._adapters()
        while self.waiting and budget > 0 and self._seats > 0:
            request = self.waiting[0]
            adapter = request.namespace.lora_name
            if limit is not None and adapter not in adapters and len(adapters) > limit:
                overtaken.append(self.waiting.popleft())
                continue
            remote = _to_fetch(request)
            if not self._start(request):
                break
            self.waiting.popleft()
            if remote:
                loading.append((request, self._load(request)))
            if request.request_id in self.loading:
                continue
            self.running.append(request)
            adapters.add(adapter)
            new = min(len(request.tokens) - request.computed, budget)
            self._grow(request, new)
            _count_work(work, request, new)
            scheduled.append((request, new))
            budget -= new
        self.waiting.extendleft(reversed(overtaken))
        return loading

    def _adapters(self) -> set[str | None]:
        """Those that run, and None, which stands for the base model; only that where nobody needs to know."""
        running = self.running if self.max_loras is not None and self.waiting else ()
        return {None, *(request.namespace.lora_name for request in running)}

    def _load(self, request: Request) -> int:
        """Blocks for the whole prompt of a request just started, and how many of its tokens must be fetched."""
        missing = request.prompt_length - request.computed
        if missing == 1:
            return 0  # the last token is computed here in any case
        self._reserve(request, request.prompt_length)
        self.loading[request.request_id] = request
        return missing

    def _start(self, request: Request) -> bool:
        """Give a waiting request the blocks it already has in the cache, if the rest of its prompt fits beside them."""
        free = self.cache.free_blocks
        if self._is_blocked(request):
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

    def _is_blocked(self, request: Request) -> bool:
        """Whether no block was freed since it last did not fit: a queue must not cost a lookup every step."""
        blocked = self._blocked
        return blocked is not None and blocked[0] is request and self.cache.free_blocks <= blocked[1]

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
        if not self._reserve(request, end):
            return False
        late = self._decode_blocks_at_finish and end > request.prompt_length
        self._store(request, request.prompt_length if late else end)
        return True

    def _reserve(self, request: Request, end: int) -> bool:
        """Blocks for its first `end` tokens; False when too few are free."""
        missing = self.blocks_for(end) - len(request.blocks)
        if missing > 0:
            blocks = self.cache.allocate(missing)
            if blocks is None:
                return False
            request.blocks += blocks
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
        if request.keep:
            self._kept[request.request_id] = request
        else:
            self.cache.release(request.blocks)
        self.running.remove(request)
        if self._decoding:
            self._decoding.leave(request)
        del self._requests[request.request_id]
        self.counters.finished_requests += 1


def _to_fetch(request: Request) -> bool:
    """Whether its admission will begin with a fetch."""
    return request.remote and not request.admitted


def _count_work(work: StepWork, request: Request, new: int) -> None:
    if new == 1 and request.generated:
        work.add_decode(request.computed + 1)
    else:
        work.add_prefill(request.computed, new)
