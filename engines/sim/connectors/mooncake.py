"""MooncakeConnector: both halves at once under one transfer_id; decode finds prefill at its bootstrap server."""

from __future__ import annotations

from engines.sim.connectors.base import DecodeLeg, Json, Leg, PrefillLeg, VllmConnector, prompt_tokens
from engines.sim.generation import Asked


class Mooncake(VllmConnector):
    pushes = True
    bootstraps = True

    def prefill(self, asked: Asked, params: Json, request_id: str | None, rank: int) -> Leg:  # noqa: ARG002
        self.check_prefill(asked)
        key = self._transfer_id(params)
        if not asked.wire.ignore_eos or asked.wire.stops:
            # It would send only what ended by length, and a stop may come first.
            self.violate("a prefill without ignore_eos, or with stop or stop_token_ids, may never send its KV")
            return Leg()
        return PrefillLeg(self.transfers, self.place.engine_ids[rank], lambda _index, _request: key)

    def decode(self, asked: Asked, params: Json, request_id: str | None) -> Leg:  # noqa: ARG002
        key = self._transfer_id(params)
        address, engine_id = params.get("remote_bootstrap_addr"), params.get("remote_engine_id")
        places = [place for place in self.fleet.places if place.bootstrap_port and place.bootstrap_url == address]
        if not places:
            raise self.refuse(f"no bootstrap server is at {address}")
        if engine_id not in places[0].engine_ids:
            raise self.refuse(f"the bootstrap server at {address} knows no engine {engine_id}")
        return DecodeLeg(self, lambda _: str(engine_id), lambda _: key, prompt_tokens)

    def _transfer_id(self, params: Json) -> str:
        key = params.get("transfer_id")
        if not isinstance(key, str) or not key:
            raise self.refuse("half a pair without transfer_id")
        return key
