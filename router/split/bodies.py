"""Splits a request: the bodies that its prefill worker and its decode worker are sent."""

from __future__ import annotations

import random
from functools import cached_property

from engines.disaggregation import CONNECTORS, Body, Connector, Handover
from engines.disaggregation.answer import Prefilled, coordinates
from engines.disaggregation.legs import answer_limit, read_body, write_body
from router.scheduling.candidates import Split
from router.workers.worker import Worker


class SplitBodies:
    """`body` None: the request cannot be split."""

    def __init__(self, body: bytes | None) -> None:
        self._raw = body
        self.refusal: str | None = None
        """Why the request cannot be split, if `can` found that."""
        self.over_length: int | None = None
        """Tokens that the request wants for its answer, if `can` found that its prompt does not leave room for them."""
        self._connector: Connector
        self._handover: Handover

    @cached_property
    def _body(self) -> Body:
        return read_body(self._raw or b"{}")

    def can(self, split: Split, room: int | None) -> bool:
        """Whether all of the fleet's connectors can split the request; `room` as in `Connector.refuses`."""
        if self._raw is None:
            return False
        try:
            reasons = [CONNECTORS[name].refuses(self._body, room) for name in split.connectors]
            self.over_length = _above(self.most_tokens, room)
        except ValueError:
            reasons = ["its body cannot be read"]
        self.refusal = next(filter(None, reasons), None)
        return self.refusal is None

    def begin(self, worker: Worker, dp_rank: int) -> tuple[bytes, bool]:
        """The prefill worker's body, and whether the decode worker is to be asked at the same time."""
        self._connector = connector = CONNECTORS[worker.connector or ""]
        # The number keeps two requests apart and is no secret.
        self._handover = Handover(worker.prefiller(dp_rank), random.getrandbits(63))
        body = connector.prefill(self._body, self._handover)
        return write_body(body), connector.together(self._handover.prefiller)

    @property
    def most_tokens(self) -> int | None:
        """The limit that the request sets for its answer; None: it sets none."""
        return answer_limit(self._body)

    @property
    def number(self) -> int:
        """The number of the transfer begun last."""
        return self._handover.number

    def learn(self, worker: Worker, answer: Prefilled) -> None:
        """Keep where decode workers register for the worker's rank, if the prefill's `answer` tells that: it holds for
        later requests too."""
        found = coordinates(answer.params) if answer.params is not None else None
        if found:
            worker.coordinates[self._handover.prefiller.dp_rank] = found

    def go_on(self, answer: Prefilled | None) -> bytes:
        """The decode worker's body. Raises ValueError when the prefill's answer lacks what the connector needs."""
        params = answer.params if answer else None
        return write_body(self._connector.decode(self._body, self._handover, params))


def _above(limit: int | None, room: int | None) -> int | None:
    return limit if limit is not None and room is not None and limit > room else None
