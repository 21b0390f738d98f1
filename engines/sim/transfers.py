"""Who offers which prompt's KV to whom: one registry for a fleet, as strict as the wire is.

A prefill request makes an `Offer`, a decode request a `Want`; they meet under one key, whichever comes first. A kept
prompt is let go when its transfer is over, its taker is gone, or its lease has ended. What a real engine would answer
with garbage, a crash or silence is written down as a violation. Times are simulated seconds; no HTTP here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from engines.sim.faults import Faults
from engines.sim.generation import Refused
from engines.sim.rank import Clock, Rank, Timer, Timers
from engines.sim.request import Request
from engines.sim.settings import SimSettings

WAIT_S = 30.0
"""How long one half of a pair waits for the other."""
REMEMBERED = 10_000
"""Keys whose end is remembered, to say why one is refused."""


@dataclass(slots=True, eq=False)
class Offer:
    """The KV of a prompt that `rank` computes or holds for another worker."""

    key: Hashable
    engine_id: str
    rank: Rank
    request: Request
    began: float
    on_met: Callable[[Request], None]
    """Told when a taker has come."""
    finished: float | None = None
    cached_tokens: int = 0
    """Of the prompt, found in the giver's own cache."""
    lease: Timer | None = None
    params: dict[str, Any] | None = None
    """As handed out with the prefill's answer."""


@dataclass(slots=True, eq=False)
class Want:
    """A request on `rank` that waits for its prompt's KV."""

    key: Hashable
    engine_id: str
    """Of the giver."""
    rank: Rank
    request: Request
    push: bool
    """The giver sends layer by layer while it computes, so that sending hides behind prefill."""
    faults: Faults
    fail: Callable[[str], None]
    """Told why there will be no KV."""
    cached_tokens: Callable[[Offer], int]
    """What the answer will say was cached."""
    missing: int | None = None
    """Prompt tokens to fetch, once it has blocks for them, at `ready`."""
    ready: float = 0.0
    timer: Timer | None = None
    over: bool = False


class Transfers:
    """Of one fleet."""

    def __init__(self, settings: SimSettings, loop: Timers, clock: Clock) -> None:
        self.settings = settings
        self.violations: list[str] = []
        self.offers: dict[Hashable, Offer] = {}
        self.wants: dict[Hashable, Want] = {}
        self._by_request: dict[Request, Want] = {}
        self._ended: OrderedDict[Hashable, str] = OrderedDict()
        self._loop = loop
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Transfers {len(self.offers)} offered, {len(self.wants)} wanted, {len(self.violations)} violations>"

    @property
    def now(self) -> float:
        return self._clock.now()

    def seconds(self, tokens: int) -> float:
        """On the wire, without the base time."""
        return tokens * self.settings.kv_bytes_per_token / (self.settings.transfer_gb_s * 1e9)

    def violate(self, text: str) -> None:
        self.violations.append(text)

    def refuse(self, text: str, status: int = 500, message: str = "Internal server error") -> Refused:
        """Write a violation down; raise what comes back."""
        self.violate(text)
        return Refused(status, message)

    def after(self, seconds: float, callback: Callable[..., object], *arguments: object) -> Timer:
        return self._loop.call_at(self._clock.loop_time(self.now + seconds), callback, *arguments)

    def fate(self, key: Hashable) -> str:
        """What became of a key that nothing is offered under."""
        return self._ended.get(key, "was never offered")

    # -- the giver

    def offer(self, offer: Offer) -> None:
        """Raises Refused when the key is taken."""
        if offer.key in self.offers:
            raise self.refuse(f"{offer.key} is used twice for prefill")
        self.offers[offer.key] = offer
        self._meet(offer.key)

    def finish(self, offer: Offer) -> None:
        """The prompt is computed and kept."""
        if self.offers.get(offer.key) is not offer:
            offer.rank.let_go(offer.request.request_id)
            return
        offer.finished, offer.cached_tokens = self.now, offer.request.cached_tokens
        if offer.key in self.wants:
            self._send(offer.key)
        else:
            self._lease(offer)

    def withdraw(self, offer: Offer, why: str = "was withdrawn") -> None:
        """Nobody gets it (any more); what was kept is let go."""
        if self.offers.get(offer.key) is offer:
            del self.offers[offer.key]
            self._remember(offer.key, why)
            want = self.wants.get(offer.key)
            if want and offer.finished is None:  # it waits for another that does not come
                want.timer = self.after(WAIT_S, self._nobody_came, want)
        cancel(offer.lease)
        offer.rank.let_go(offer.request.request_id)

    def _lease(self, offer: Offer) -> None:
        cancel(offer.lease)
        offer.lease = self.after(self.settings.lease_s, self.withdraw, offer, "was offered until its lease was over")

    # -- the taker

    def want(self, want: Want) -> None:
        """Raises Refused when the key is taken."""
        if want.key in self.wants:
            raise self.refuse(f"{want.key} is used twice for decode")
        self.wants[want.key] = self._by_request[want.request] = want
        want.timer = self.after(WAIT_S, self._nobody_came, want)
        self._meet(want.key)

    def fetch(self, request: Request, missing: int) -> None:
        """The request has its blocks, and lacks the KV of `missing` prompt tokens."""
        want = self._by_request.get(request)
        if want is None or want.over:
            return
        want.missing, want.ready = missing, self.now
        self._send(want.key)

    def drop(self, want: Want) -> None:
        """The taker is gone, or served; whatever was offered to it is let go."""
        want.over = True
        cancel(want.timer)
        self._by_request.pop(want.request, None)
        if self.wants.get(want.key) is not want:
            return
        del self.wants[want.key]
        offer = self.offers.get(want.key)
        if offer is not None and offer.finished is not None:
            self.withdraw(offer, "was used before")

    def _nobody_came(self, want: Want) -> None:
        self._fail(want, f"{want.key} {self.fate(want.key)}, though a decode waits for it")

    def _fail(self, want: Want, text: str) -> None:
        self.violate(text)
        want.fail(text)
        self.drop(want)

    # -- both

    def _meet(self, key: Hashable) -> None:
        offer, want = self.offers.get(key), self.wants.get(key)
        if offer is None or want is None:
            return
        cancel(offer.lease)
        cancel(want.timer)
        if text := _mismatch(offer, want):
            self._fail(want, text)
        else:
            offer.on_met(offer.request)
            self._send(key)

    def _send(self, key: Hashable) -> None:
        """Once the prompt is computed and there are blocks to take it."""
        offer, want = self.offers.get(key), self.wants.get(key)
        if offer is None or want is None or offer.finished is None or want.missing is None:
            return
        fault = want.faults.take_transfer() if want.missing else None
        if fault == "transfer_hangs":
            self._lease(offer)
        elif fault == "transfer_fails":
            want.timer = self.after(self.settings.transfer_base_s, self._lose, want)
        else:
            self._give(offer, want, want.missing)

    def _give(self, offer: Offer, want: Want, missing: int) -> None:
        want.request.cached_tokens = want.cached_tokens(offer)
        if not missing:
            self._arrived(want)
            return
        begin = max(offer.began, want.ready) if want.push else self.now
        end = max(self.now, begin + self.seconds(missing))
        want.timer = self.after(end - self.now + self.settings.transfer_base_s, self._arrived, want)

    def _arrived(self, want: Want) -> None:
        self.drop(want)
        want.rank.loaded(want.request.request_id)

    def _lose(self, want: Want) -> None:
        want.fail("the transfer failed")
        self.drop(want)

    def _remember(self, key: Hashable, why: str) -> None:
        self._ended[key] = why
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)


def _mismatch(offer: Offer, want: Want) -> str | None:
    if offer.engine_id != want.engine_id:
        return f"{offer.key} is offered by engine {offer.engine_id}, asked of {want.engine_id}"
    theirs, ours = offer.request, want.request
    same = theirs.tokens[: theirs.prompt_length] == ours.tokens[: ours.prompt_length]
    if not same or theirs.namespace != ours.namespace:
        return f"{offer.key} is another prompt on the prefill worker than on the decode worker"
    return None


def cancel(timer: Timer | None) -> None:
    if timer is not None:
        timer.cancel()
