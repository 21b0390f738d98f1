"""MooncakeStoreConnector: no parameters; what prefill workers computed is in a store that everybody loads from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from engines.sim.connectors.base import FAILED, Connector, Fleet, Leg
from engines.sim.generation import Asked, Refused
from engines.sim.place import Place
from engines.sim.rank import Rank, Sink, Timer
from engines.sim.request import Request
from engines.sim.settings import SimSettings
from indexer.types import SequenceHash


class StoreConnector(Connector):
    def __init__(self, place: Place, fleet: Fleet, settings: SimSettings) -> None:
        super().__init__(place, fleet, settings)
        self.legs: dict[Request, StoreLeg] = {}

    def leg(self, asked: Asked, request_id: str | None, rank: int) -> Leg:  # noqa: ARG002
        return StoreLeg(self)

    def fetch(self, rank: Rank, request: Request, missing: int) -> None:
        leg = self.legs.get(request)
        if leg is not None:
            leg.fetch(rank, request, missing)


class StoreLeg(Leg):
    """Of what the own cache lacks, the store's part is loaded and the rest computed."""

    remote = True

    def __init__(self, connector: StoreConnector) -> None:
        self._connector = connector
        self._fail: Callable[[Refused], None] | None = None
        self._requests: Sequence[Request] = ()
        self._timers: list[Timer] = []

    def start(
        self, requests: Sequence[Request], rank: Rank, submit: Callable[[], None], fail: Callable[[Refused], None]
    ) -> None:
        del rank
        self._fail, self._requests = fail, requests
        self._connector.legs.update(dict.fromkeys(requests, self))
        submit()

    def sink(self, request: Request, sink: Sink) -> Sink:
        if self._connector.place.role == "decode":
            return sink
        return _Storing(sink, self._connector.fleet.stored, request, self._connector.settings.block_size)

    def fetch(self, rank: Rank, request: Request, missing: int) -> None:
        connector, transfers = self._connector, self._connector.transfers
        size = connector.settings.block_size
        held = len(list(takewhile(connector.fleet.stored.__contains__, request.hashes))) * size
        if connector.place.role == "decode" and not held and request.prompt_length >= size:
            connector.violate("a decode without its prefill: nothing of its prompt was prefilled elsewhere")
        own = request.prompt_length - missing
        if not missing or held <= own:
            rank.loaded(request.request_id, own)
            return
        fault = connector.place.faults.take_transfer()
        if fault == "transfer_fails" and self._fail is not None:
            fail = self._fail
            self._timers.append(transfers.after(transfers.settings.transfer_base_s, fail, Refused(500, FAILED)))
        elif fault is None:
            seconds = transfers.seconds(held - own) + transfers.settings.transfer_base_s
            self._timers.append(transfers.after(seconds, _loaded, rank, request, held))

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for request in self._requests:
            self._connector.legs.pop(request, None)


@dataclass(slots=True)
class _Storing:
    """Puts the prompt's full blocks when its first token is there."""

    sink: Sink
    stored: set[SequenceHash]
    request: Request
    block_size: int

    def on_token(self, position: int, finished: bool) -> None:
        if position == 0:
            self.stored.update(self.request.hashes[: self.request.prompt_length // self.block_size])
        self.sink.on_token(position, finished)


def _loaded(rank: Rank, request: Request, tokens: int) -> None:
    request.cached_tokens = tokens
    rank.loaded(request.request_id, tokens)
