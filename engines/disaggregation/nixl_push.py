"""vLLM's NixlPushConnector: the decode worker registers with the prefill worker, which writes when it has computed.

The two meet by the request id, the same on both legs (the router sends X-Request-Id). To register, the decode worker
must know where: each answer of the prefill worker tells it, so only the first request to a worker waits for that.
"""

from __future__ import annotations

import msgspec

from engines.disaggregation.legs import (
    Body,
    Handover,
    Prefiller,
    first_token_by_length,
    length_matters,
    probabilities_of_prompt,
    several_sequences,
    with_transfer,
)
from engines.disaggregation.nixl import TO_PREFILL, verbatim

COORDINATES = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size")
"""Of an answer's parameters, what holds for every request to that worker."""


class NixlPush:
    pushes = True

    def refuses(self, body: Body, room: int | None = None) -> str | None:
        return several_sequences(body) or length_matters(body, room) or probabilities_of_prompt(body)

    def lacks(self, prefiller: Prefiller) -> str | None:  # noqa: ARG002 -- a Connector
        return None

    def together(self, prefiller: Prefiller) -> bool:
        return prefiller.coordinates is not None

    def prefill(self, body: Body, handover: Handover) -> Body:
        return with_transfer(first_token_by_length(body, handover.prefiller), TO_PREFILL)

    def decode(self, body: Body, handover: Handover, returned: msgspec.Raw | None) -> Body:
        known = handover.prefiller.coordinates
        if returned is not None or known is None:
            return verbatim(body, returned)
        # What the prefill worker calls the request nobody knows yet, but vLLM 0.24 to 0.32 dies where nothing is said
        # (kv_connector/v1/nixl/metadata.py).
        named = {"remote_request_id": handover.name}
        return with_transfer(body, {"do_remote_prefill": True, "do_remote_decode": False, **known, **named})
