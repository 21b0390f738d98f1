"""NixlPushConnector: both halves at once under one X-Request-Id; decode knows where prefill is, and prefill writes."""

from __future__ import annotations

from engines.sim.connectors.base import DecodeLeg, Json, Leg, PrefillLeg, VllmConnector, prompt_tokens
from engines.sim.generation import Asked

IDENTITY = ("remote_engine_id", "remote_host", "remote_port", "tp_size")


class NixlPush(VllmConnector):
    pushes = True

    def prefill(self, asked: Asked, params: Json, request_id: str | None, rank: int) -> Leg:  # noqa: ARG002
        self.check_prefill(asked)
        key = self._base_id(request_id)
        return PrefillLeg(
            self.transfers,
            self.place.engine_ids[rank],
            lambda _index, _request: key,
            lambda offer: self.answered(offer, rank, "push"),
        )

    def decode(self, asked: Asked, params: Json, request_id: str | None) -> Leg:  # noqa: ARG002
        key = self._base_id(request_id)
        given = {name: params.get(name) for name in IDENTITY}
        if given not in self._givers():
            raise self.refuse(f"no prefill worker is at {given}")
        if "remote_request_id" not in params:  # read without a default, in the scheduler: the engine dies of it
            raise self.refuse("a decode without remote_request_id kills its engine")
        return DecodeLeg(self, lambda _: str(given["remote_engine_id"]), lambda _: key, prompt_tokens)

    def _base_id(self, request_id: str | None) -> str:
        if not request_id:
            raise self.refuse("half a pair without X-Request-Id")
        return request_id

    def _givers(self) -> list[Json]:
        return [
            place.identity(rank)
            for place in self.fleet.places
            if place.role != "decode"
            for rank in range(len(place.engine_ids))
        ]
