"""What is booked for a request until it ends, and what the latency model learns from its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.types import WorkerRank
from router.scheduling.backlog import Entry
from router.scheduling.decision import Decision, Onward
from router.scheduling.kv_loads import KVLoad
from router.scheduling.latency import Prefill
from router.scheduling.load import Reservation, subtract
from router.scheduling.others import ALONE, Others

if TYPE_CHECKING:
    from router.scheduling.scheduler import Scheduler


class Booking:
    """One request's booking on one rank: its reservation in the load book, and what its tokens teach the latency model.
    Its owner releases it however the request ends."""

    __slots__ = ("_adapter", "_answer", "_booked", "_others", "_rank", "_reservation", "_scheduler", "_token_at")

    def __init__(
        self,
        scheduler: Scheduler,
        rank: WorkerRank,
        reservation: Reservation,
        now: float,
        others: Others,
        adapter: str | None,
    ) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._reservation = reservation
        self._booked = now
        self._others = others
        self._adapter = adapter
        if adapter is not None:
            scheduler.book.adapters.begin(rank, adapter)
        self._answer = 0
        """Tokens of the answer that were seen after the first."""
        self._token_at: float | None = None
        """When the latest token came; None before the first, and where there are several answers, whose tokens come
        mixed."""

    def first_token(self, now: float) -> None:
        """The first token is there. Does nothing a second time, or after the release."""
        raise NotImplementedError

    def assume_first_token(self, now: float) -> None:
        """The first token should be there by now. Nothing is learned from that."""
        raise NotImplementedError

    def generated(self, tokens: int, now: float) -> None:
        """So many more tokens have come since the last call or the first token."""
        self._reservation.generated(tokens)
        if self._token_at is None:
            return
        latency, rank = self._scheduler.latency, self._rank
        passed, self._token_at = now - self._token_at, now
        self._answer += tokens
        if latency.observe_steps(rank, tokens, passed, now):
            load = self._scheduler.book.load(rank, now)
            latency.fold_steps(rank, load.requests, load.active_tokens, now)

    def release(self, now: float) -> None:
        """Give everything back; a second time does nothing."""
        if self._reservation.released:
            return
        self._reservation.release()
        if self._adapter is not None:
            self._scheduler.book.adapters.end(self._rank, self._adapter)
        self._ended(now)
        self._scheduler.changed()

    def _ended(self, now: float) -> None:
        raise NotImplementedError

    def _learn_from_end(self, now: float) -> None:
        """An answer from this rank has ended."""
        latency = self._scheduler.latency
        latency.observe_residence(now - self._booked)
        if self._token_at is not None:
            latency.observe_answer(self._answer)


class PrefillBooking(Booking):
    """A request's booking on the rank that computes its prompt, and that also decodes unless the request is split. If
    the decode rank is only chosen when the prompt is computed, load is booked at the likely one meanwhile, so that it
    does not look idle."""

    __slots__ = (
        "_beside",
        "_decode_meanwhile",
        "_entry",
        "_handed_on",
        "_loads",
        "_past_prefill",
        "_prefill",
        "_streamed",
    )

    def __init__(
        self,
        scheduler: Scheduler,
        decision: Decision,
        now: float,
        streamed: bool,
        past_prefill: bool = False,
        others: Others = ALONE,
    ) -> None:
        """`streamed`: the end of the prefill will be seen. `past_prefill`: the prefill counts as done from the start,
        since its end will be neither seen nor predicted."""
        tokens, further = decision.prefill_tokens, others.tokens
        prefill_tokens = 0 if past_prefill else tokens + further
        prompt_tokens, new_tokens = decision.prompt_tokens + further, decision.new_tokens + further
        reservation = scheduler.book.reserve(decision.rank, prefill_tokens, prompt_tokens, new_tokens, others.sequences)
        super().__init__(scheduler, decision.rank, reservation, now, others, decision.adapter)
        self._streamed = streamed
        self._past_prefill = past_prefill
        self._handed_on = decision.split is not None
        """Another rank decodes."""
        self._loads: list[KVLoad] = []
        """KV loads of the prompt that are under way, from the slowest tier to the fastest."""
        self._beside = 0.0
        """Seconds until the first token that are expected of everything but the slowest of these loads."""
        self._entry: Entry | None = None
        """The prefill in the backlog, until it is done."""
        if scheduler.backlog.wanted and not past_prefill:
            self._prefill = Prefill(tokens, decision.prompt_tokens)
            self._entry = self._enter_backlog(decision, now)
        self._decode_meanwhile = self._book_likely_decode(decision, now)

    def _enter_backlog(self, decision: Decision, now: float) -> Entry:
        latency = self._scheduler.latency
        work = latency.prefill_share(self._prefill) + latency.others_share(self._others.tokens, decision.prompt_tokens)
        joins = self._begin_loads(decision, now) if decision.loads else None
        return self._scheduler.backlog.add(decision.rank, work, now, joins)

    def _book_likely_decode(self, decision: Decision, now: float) -> DecodeBooking | None:
        """The load at the decode rank of the moment; None if nobody else decodes, or if that was chosen for good."""
        split, onward = decision.split, decision.onward
        if split is None or onward is None or split.pushes[decision.position]:
            return None
        tokens = decision.prompt_tokens
        return DecodeBooking(self._scheduler, decision.rank, onward, tokens, now, self._streamed, self._others)

    def _begin_loads(self, decision: Decision, now: float) -> float | None:
        """Book the KV loads. Returns when they should be done, if that can be predicted."""
        predicted = decision.predicted
        if not predicted:
            return None
        parts = zip(self._scheduler.loads, decision.loaded_tokens, strict=True)
        self._loads = [KVLoad(loads, decision.rank, tokens, now) for loads, tokens in parts if tokens]
        self._beside = predicted.queue + predicted.prefill + sum(load.expected for load in self._loads[1:])
        return now + predicted.queue + predicted.load

    def first_token(self, now: float) -> None:
        if self._past_prefill or self._others.tokens:
            return
        entry = self._end_prefill()
        if entry is not None:
            seconds = self._scheduler.backlog.done(entry, now)
            if self._streamed:
                self._token_at = None if self._others.sequences else now
                self._learn(seconds, now)
            else:
                self._learn_from_whole(seconds, now)
        self._scheduler.changed()

    def _end_prefill(self) -> Entry | None:
        """Give back the load of the prefill. Returns its entry in the backlog, which the caller has to take out."""
        self._past_prefill = True
        self._reservation.first_token()
        entry, self._entry = self._entry, None
        return entry

    def _learn(self, seconds: float | None, now: float) -> None:
        """If KV was loaded, the time is a sample of the slowest load, not of the prefill."""
        if self._loads:
            self._loads.pop(0).done(now, self._beside)
            self._drop_loads(now)
        elif seconds is not None and self._prefill.prompt:
            self._scheduler.latency.observe_prefill(self._rank, self._prefill, seconds, now)

    def _learn_from_whole(self, seconds: float | None, now: float) -> None:
        """The answer came whole: its time is an upper bound of the prefill's, and a sample if the prediction is
        longer."""
        latency, rank = self._scheduler.latency, self._rank
        if self._loads:
            self._drop_loads(now)
        elif seconds is not None and self._prefill.prompt and seconds < latency.prefill_seconds_on(rank, self._prefill):
            latency.observe_prefill(rank, self._prefill, seconds, now)

    def assume_first_token(self, now: float) -> None:
        if self._past_prefill:
            return
        entry = self._end_prefill()
        if entry is not None:
            self._drop_loads(now)
            self._scheduler.backlog.done(entry, now)
        self._scheduler.changed()

    def _drop_loads(self, now: float) -> None:
        while self._loads:
            self._loads.pop().drop(now)

    def _ended(self, now: float) -> None:
        if self._decode_meanwhile:
            self._decode_meanwhile.release(now)
        if self._past_prefill:
            if not self._handed_on:
                self._learn_from_end(now)
            return
        entry = self._end_prefill()
        if entry is not None:
            self._drop_loads(now)
            self._scheduler.backlog.drop(entry, now)


class DecodeBooking(Booking):
    """A split request's booking on the rank that decodes. Another rank, the `source`, computes the prompt and keeps its
    KV until this one has fetched it."""

    __slots__ = ("_decodes", "_handing_over", "_prefilled", "_source", "_streamed", "moved_tokens", "onward")

    def __init__(
        self,
        scheduler: Scheduler,
        source: WorkerRank,
        onward: Onward,
        prompt_tokens: int,
        now: float,
        streamed: bool,
        others: Others = ALONE,
    ) -> None:
        self.moved_tokens = max(0, prompt_tokens - onward.overlap_tokens)
        """Tokens of the prompt whose KV has to be moved here."""
        further = others.tokens
        new_tokens = self.moved_tokens + further
        reservation = scheduler.book.reserve(onward.rank, 0, prompt_tokens + further, new_tokens, others.sequences)
        super().__init__(scheduler, onward.rank, reservation, now, others, onward.adapter)
        self._source = source
        self.onward = onward
        self._streamed = streamed
        self._decodes = False
        """The first token has come from here."""
        self._handing_over = False
        """The prompt is computed, and its source keeps the KV for this rank (`Scheduler.handing_over`)."""
        self._prefilled: float | None = None
        """When the prompt was computed."""

    def prefilled(self, now: float) -> None:
        """The prompt is computed: from now on the transfer is under way."""
        self._prefilled = now
        if not (self._decodes or self._handing_over or self._reservation.released):
            self._handing_over = True
            self._scheduler.handing_over[self._source] += 1

    def first_token(self, now: float) -> None:
        if self._decodes or self._reservation.released:
            return
        self._begin()
        self._token_at = None if self._others.sequences else now
        if self._streamed and self._prefilled is not None and not self._others.tokens:
            onward = self.onward
            seconds = max(0.0, now - self._prefilled - onward.step)
            self._scheduler.disaggregation.transfers.observe(onward.near, onward.work, seconds, now)

    def assume_first_token(self, now: float) -> None:  # noqa: ARG002 -- a Booking
        self._begin()

    def _begin(self) -> None:
        self._decodes = True
        self._let_go()

    def _let_go(self) -> None:
        """The source may drop the prompt's KV."""
        if self._handing_over:
            self._handing_over = False
            subtract(self._scheduler.handing_over, self._source, 1)

    def _ended(self, now: float) -> None:
        self._let_go()
        if self._decodes:
            self._learn_from_end(now)
