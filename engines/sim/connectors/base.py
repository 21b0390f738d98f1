"""One worker's end of a connector, and one request's leg of a pair."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from engines.sim.generation import STREAM_OPTIONS, Asked, Refused, too_few
from engines.sim.place import Place
from engines.sim.rank import Rank, Sink, Timer
from engines.sim.request import Request
from engines.sim.scheduler import Scheduler
from engines.sim.settings import SimSettings
from engines.sim.transfers import WAIT_S, Offer, Transfers, Want, cancel
from indexer.types import SequenceHash

Json = dict[str, Any]
FAILED = "Internal server error"
WITHOUT = {"prefill": "a prefill without its decode", "decode": "a decode without its prefill"}


@dataclass(slots=True)
class Fleet:
    """What the connectors of a fleet share."""

    transfers: Transfers
    places: list[Place] = field(default_factory=list)
    stored: set[SequenceHash] = field(default_factory=set)
    """Blocks that any worker may load, where there is a store; it forgets nothing."""
    schedulers: list[Scheduler] = field(default_factory=list)

    def state(self) -> Json:
        """What GET /sim/transfers says; `offered`, `loading` and `kept` are 0 when nothing is under way."""
        transfers, schedulers = self.transfers, self.schedulers
        unseated = sum(want.missing is None for want in transfers.wants.values())
        return {
            "offered": len(transfers.offers),
            "loading": unseated + sum(len(scheduler.loading) for scheduler in schedulers),
            "kept": sum(scheduler.kept for scheduler in schedulers),
            "violations": transfers.violations,
            "transferred_tokens": sum(scheduler.counters.transferred_tokens for scheduler in schedulers),
        }


class Leg:
    """A request that needs no other worker."""

    remote = False
    keep = False
    max_tokens: int | None = None
    """Instead of what was asked for."""

    def start(
        self, requests: Sequence[Request], rank: Rank, submit: Callable[[], None], fail: Callable[[Refused], None]
    ) -> None:
        """Calls `submit` when its prompts may be computed or loaded, `fail` if they cannot be. May raise Refused."""
        del requests, rank, fail
        submit()

    def sink(self, request: Request, sink: Sink) -> Sink:  # noqa: ARG002 - others look at it
        """What hears of the request's tokens."""
        return sink

    def answer_params(self) -> Json | None:
        """`kv_transfer_params` of the whole answer."""
        return None

    def close(self) -> None:
        """The answer is over, or its client gone."""


@dataclass(slots=True)
class _Finishing:
    sink: Sink
    finish: Callable[[], None]

    def on_token(self, position: int, finished: bool) -> None:
        if finished:
            self.finish()
        self.sink.on_token(position, finished)


class PrefillLeg(Leg):
    """Offers its prompts. With `waits` nothing is computed before a taker has come."""

    keep = True

    def __init__(
        self,
        transfers: Transfers,
        engine_id: str,
        keys: Callable[[int, Request], Hashable],
        params: Callable[[Offer], Json] | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self._transfers = transfers
        self._engine_id = engine_id
        self._keys = keys
        self._params = params
        self._waits = waits
        self._offers: dict[Request, Offer] = {}
        self._timer: Timer | None = None

    def start(
        self, requests: Sequence[Request], rank: Rank, submit: Callable[[], None], fail: Callable[[Refused], None]
    ) -> None:
        if self._waits:
            self._timer = self._transfers.after(WAIT_S, self._nobody_came, fail)
        waiting = set(requests)

        def on_met(request: Request) -> None:
            waiting.discard(request)
            if self._waits and not waiting:
                cancel(self._timer)
                submit()

        for index, request in enumerate(requests):
            offer = self._offers[request] = Offer(
                self._keys(index, request), self._engine_id, rank, request, self._transfers.now, on_met
            )
            self._transfers.offer(offer)
        if not self._waits:
            submit()

    def _nobody_came(self, fail: Callable[[Refused], None]) -> None:
        fail(self._transfers.refuse("a prefill that no decode came for"))

    def sink(self, request: Request, sink: Sink) -> Sink:
        return _Finishing(sink, lambda: self._transfers.finish(self._offers[request]))

    def answer_params(self) -> Json | None:
        return self._params(next(iter(self._offers.values()))) if self._params else None

    def close(self) -> None:
        cancel(self._timer)
        for offer in self._offers.values():
            if offer.finished is None:
                self._transfers.withdraw(offer, "was given up by its prefill")


class DecodeLeg(Leg):
    """Its prompts come from elsewhere, each under a key of its own, all from `engine_id`."""

    remote = True

    def __init__(
        self,
        connector: Connector,
        engine_id: Callable[[int], str],
        keys: Callable[[int], Hashable],
        cached_tokens: Callable[[Offer], int],
        *,
        message: str = FAILED,
    ) -> None:
        self._connector = connector
        self._engine_id = engine_id
        self._keys = keys
        self._cached_tokens = cached_tokens
        self._message = message
        self._wants: list[Want] = []

    def start(
        self, requests: Sequence[Request], rank: Rank, submit: Callable[[], None], fail: Callable[[Refused], None]
    ) -> None:
        for index, request in enumerate(requests):
            want = Want(
                key=self._keys(index),
                engine_id=self._engine_id(index),
                rank=rank,
                request=request,
                push=self._connector.pushes,
                faults=self._connector.place.faults,
                fail=lambda _why: fail(Refused(500, self._message)),
                cached_tokens=self._cached_tokens,
            )
            self._wants.append(want)
            self._connector.transfers.want(want)
        submit()

    def close(self) -> None:
        for want in self._wants:
            self._connector.transfers.drop(want)


class Connector:
    """Of one worker. As it stands it connects nothing: every request is served where it is."""

    pushes: ClassVar[bool] = False
    bootstraps: ClassVar[bool] = False
    """Whether prefill workers have a bootstrap server."""

    def __init__(self, place: Place, fleet: Fleet, settings: SimSettings) -> None:
        self.place = place
        self.fleet = fleet
        self.settings = settings
        self.transfers = fleet.transfers

    def rank(self, asked: Asked) -> int | None:  # noqa: ARG002 - others look at it
        """The data-parallel rank that the request's parameters lead to."""
        return None

    def leg(self, asked: Asked, request_id: str | None, rank: int) -> Leg:  # noqa: ARG002
        """Raises Refused; `request_id` is the client's X-Request-Id."""
        return Leg()

    def fetch(self, rank: Rank, request: Request, missing: int) -> None:  # noqa: ARG002
        """The request has blocks for its prompt, and lacks the KV of `missing` tokens."""
        self.transfers.fetch(request, missing)

    def refuse(self, text: str, status: int = 500, message: str = FAILED) -> Refused:
        return self.transfers.refuse(f"{self.place.name}: {text}", status, message)

    def violate(self, text: str) -> None:
        self.transfers.violate(f"{self.place.name}: {text}")


class VllmConnector(Connector):
    """vLLM's point-to-point connectors: `kv_transfer_params` says which half a request is."""

    def leg(self, asked: Asked, request_id: str | None, rank: int) -> Leg:
        params = asked.wire.params or {}
        sends, takes = params.get("do_remote_decode") is True, params.get("do_remote_prefill") is True
        role = self.place.role
        if sends == takes:
            if sends or role != "both":
                raise self.refuse(WITHOUT.get(role, "one request is both halves"))
            return Leg()
        if role == ("decode" if sends else "prefill"):
            raise self.refuse("a prefill sent to a decode worker" if sends else "a decode sent to a prefill worker")
        if len(asked.prompts) != 1:
            raise self.refuse("several prompts share one set of transfer parameters")
        if asked.n != 1:
            raise self.refuse("several answers share one prompt's KV, which is let go after the first")
        return self.prefill(asked, params, request_id, rank) if sends else self.decode(asked, params, request_id)

    def prefill(self, asked: Asked, params: Json, request_id: str | None, rank: int) -> Leg:
        raise NotImplementedError

    def decode(self, asked: Asked, params: Json, request_id: str | None) -> Leg:
        raise NotImplementedError

    def check_prefill(self, asked: Asked) -> None:
        """Raises Refused unless it makes one token and says nothing of streams that are none."""
        if asked.max_tokens != [1]:
            raise self.refuse(f"a prefill makes one token, not {asked.max_tokens[0]}")
        if asked.stream_options and not asked.stream:
            raise self.refuse("a prefill with stream_options but no stream", 400, STREAM_OPTIONS)
        if asked.min_tokens > 1:
            raise self.refuse("a prefill with min_tokens", 400, too_few(asked.min_tokens, 1))

    def answered(self, offer: Offer, rank: int, mode: str) -> Json:
        """The parameters that a prefill's answer carries."""
        request = offer.request
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(request.blocks)],
            "remote_request_id": offer.key,
            **self.place.identity(rank),
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.prompt_length,
            "transfer_mode": mode,
        }


def prompt_tokens(offer: Offer) -> int:
    return offer.request.prompt_length


def own_hit(offer: Offer) -> int:
    """What the giver had found in its own cache."""
    return offer.cached_tokens
