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
    Prefiller,
    first_token_by_length,
    length_matters,
    probabilities_of_prompt,
    read_body,
    several_sequences,
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


class Nixl:
    pushes = False

    def refuses(self, body: Body, room: int | None = None) -> str | None:
        return several_sequences(body) or length_matters(body, room) or probabilities_of_prompt(body)

    def lacks(self, prefiller: Prefiller) -> str | None:  # noqa: ARG002 -- a Connector
        return None

    def together(self, prefiller: Prefiller) -> bool:  # noqa: ARG002 -- a Connector
        return False

    def prefill(self, body: Body, handover: Handover) -> Body:
        return with_transfer(first_token_by_length(body, handover.prefiller), TO_PREFILL)

    def decode(self, body: Body, handover: Handover, returned: msgspec.Raw | None) -> Body:  # noqa: ARG002
        return verbatim(body, returned)


def verbatim(body: Body, returned: msgspec.Raw | None) -> Body:
    """With what the prefill worker answered, byte for byte where the client adds no tokens to it."""
    if returned is None:
        raise ValueError("it answered no kv_transfer_params: is it started with the connector that was stated?")
    if token_ids_in(body) is None:
        return {**body, TRANSFER: returned}
    return with_transfer(body, read_body(returned))
