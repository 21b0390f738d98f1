"""One request in two bodies: what its prefill worker and its decode worker are asked."""

from __future__ import annotations

import random
from functools import cached_property

from engines.disaggregation import CONNECTORS, Body, Connector, Handover
from engines.disaggregation.answer import Prefilled, coordinates
from engines.disaggregation.legs import answer_limit, read_body, write_body
from router.fleet import Worker
from router.scheduling.decision import Split


class Parting:
    """`body` None: of a request that has no parts."""

    def __init__(self, body: bytes | None) -> None:
        self._raw = body
        self.refusal: str | None = None
        """Why a connector cannot serve the request, where one was asked."""
        self._connector: Connector
        self._handover: Handover

    @cached_property
    def _body(self) -> Body:
        return read_body(self._raw or b"{}")

    def can(self, split: Split, room: int | None) -> bool:
        """Whether the fleet's connectors can serve it in two parts; `room` as for these."""
        if self._raw is None:
            return False
        try:
            reasons = [CONNECTORS[name].refuses(self._body, room) for name in split.connectors]
        except ValueError:
            reasons = ["its body cannot be read"]
        self.refusal = next(filter(None, reasons), None)
        return self.refusal is None

    def begin(self, worker: Worker, dp_rank: int) -> tuple[bytes, bool]:
        """The prefill worker's body, and whether the decode worker is asked at the same time."""
        self._connector = connector = CONNECTORS[worker.connector or ""]
        # The number keeps two requests apart and is no secret.
        self._handover = Handover(worker.prefiller(dp_rank), random.getrandbits(63))
        body = connector.prefill(self._body, self._handover)
        return write_body(body), connector.together(self._handover.prefiller)

    @property
    def most_tokens(self) -> int | None:
        """That the answer may have, where the request says so."""
        return answer_limit(self._body)

    @property
    def number(self) -> int:
        """Names the transfer that was begun last."""
        return self._handover.number

    def learn(self, worker: Worker, answer: Prefilled) -> None:
        """What holds for the next requests to the worker's rank too."""
        found = coordinates(answer.params) if answer.params is not None else None
        if found:
            worker.coordinates[self._handover.prefiller.dp_rank] = found

    def go_on(self, answer: Prefilled | None) -> bytes:
        """The decode worker's body. Raises ValueError when the answer lacks what it needs."""
        params = answer.params if answer else None
        return write_body(self._connector.decode(self._body, self._handover, params))
