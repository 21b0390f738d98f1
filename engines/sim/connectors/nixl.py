"""NixlConnector: prefill first; its answer's parameters go to decode as they are, and decode pulls."""

from __future__ import annotations

from typing import Any

from engines.sim.connectors.base import DecodeLeg, Json, Leg, PrefillLeg, VllmConnector, own_hit
from engines.sim.generation import Asked
from engines.sim.transfers import Offer

ADDED = frozenset({"prompt_token_ids"})
"""What a router may add to the parameters."""


class Nixl(VllmConnector):
    def prefill(self, asked: Asked, params: Json, request_id: str | None, rank: int) -> Leg:  # noqa: ARG002
        self.check_prefill(asked)
        if asked.stream:
            self.violate("a streamed prefill answers no parameters, and its KV stays until its lease ends")
        return PrefillLeg(
            self.transfers,
            self.place.engine_ids[rank],
            lambda _index, request: f"cmpl-{request.request_id}-0",
            lambda offer: self._hand_out(offer, rank),
        )

    def _hand_out(self, offer: Offer, rank: int) -> Json:
        offer.params = {
            **self.answered(offer, rank, "pull"),
            "remote_blocks_expiry_time": (offer.finished or 0.0) + self.settings.lease_s,
            "remote_prefill_cached_tokens": offer.cached_tokens,
        }
        return offer.params

    def decode(self, asked: Asked, params: Json, request_id: str | None) -> Leg:  # noqa: ARG002
        key = params.get("remote_request_id")
        offer = self.transfers.offers.get(key) if isinstance(key, str) else None
        if offer is None or offer.params is None:
            raise self.refuse(f"remote_request_id {key} {self.transfers.fate(str(key))}")
        given = {name: value for name, value in params.items() if name not in ADDED}
        if text := _difference(offer.params, given):
            raise self.refuse(text)
        return DecodeLeg(self, lambda _: offer.engine_id, lambda _: offer.key, own_hit)


def _difference(handed_out: Json, given: Json) -> str | None:
    names = [name for name in {**handed_out, **given} if _said(handed_out, name) != _said(given, name)]
    return f"transfer parameters are not as handed out: {', '.join(names)}" if names else None


def _said(params: Json, name: str) -> tuple[bool, type, Any]:
    """Also whether it is there, and its type: true is not 1."""
    return name in params, type(params.get(name)), params.get(name)
