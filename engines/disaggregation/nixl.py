"""vLLM's NixlConnector: the decode worker pulls, so it is asked when the prefill worker has answered.

As vLLM 0.32 has it (distributed/kv_transfer/kv_connector/v1/nixl): the prefill worker keeps the blocks on a lease and
answers where they are; its answer goes to the decode worker verbatim. The same answer must not be used twice.
"""

from __future__ import annotations

import msgspec

from engines.disaggregation.legs import (
    TRANSFER,
    Body,
    Handover,
    SingleSequenceConnector,
    first_token_by_length,
    read_body,
    token_ids_in,
    with_transfer,
)

TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Nixl(SingleSequenceConnector):
    def prefill(self, body: Body, handover: Handover) -> Body:
        return with_transfer(first_token_by_length(body, handover.prefiller), TO_PREFILL)

    def decode(self, body: Body, handover: Handover, returned: msgspec.Raw | None) -> Body:  # noqa: ARG002
        """With what the prefill worker answered, byte for byte unless the client adds the prompt's tokens to it."""
        if returned is None:
            raise ValueError("it answered no kv_transfer_params: is it started with the connector that was stated?")
        if token_ids_in(body) is None:
            return {**body, TRANSFER: returned}
        return with_transfer(body, read_body(returned))
