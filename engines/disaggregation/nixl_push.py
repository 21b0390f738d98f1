"""vLLM's NixlPushConnector: the decode worker registers with the prefill worker, which writes when it has computed.

The two meet by the request id, the same on both legs (the router sends X-Request-Id). To register, the decode worker
must know where: each answer of the prefill worker tells it, so only the first request to a worker waits for that.
"""

from __future__ import annotations

import msgspec

from engines.disaggregation.legs import Body, Handover, Prefiller, with_transfer
from engines.disaggregation.nixl import Nixl

COORDINATES = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size")
"""Of an answer's parameters, what holds for every request to that worker."""


class NixlPush(Nixl):
    pushes = True

    def together(self, prefiller: Prefiller) -> bool:
        return prefiller.coordinates is not None

    def decode(self, body: Body, handover: Handover, returned: msgspec.Raw | None) -> Body:
        known = handover.prefiller.coordinates
        if returned is not None or known is None:
            return super().decode(body, handover, returned)
        # What the prefill worker calls the request is not known yet, but vLLM 0.24 to 0.32 crashes where the field is
        # missing (kv_connector/v1/nixl/metadata.py).
        named = {"remote_request_id": handover.name}
        return with_transfer(body, {"do_remote_prefill": True, "do_remote_decode": False, **known, **named})
