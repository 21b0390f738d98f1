"""vLLM's MooncakeConnector: the prefill worker pushes; both legs are sent at once and meet by a transfer id.

As vLLM 0.32 has it (distributed/kv_transfer/kv_connector/v1/mooncake): the decode worker looks the engine up at the
prefill worker's bootstrap server; KV is sent only by a prefill that ended because of its length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from engines.answers import UNDECODABLE
from engines.disaggregation.legs import (
    Body,
    Handover,
    Prefiller,
    SingleSequenceConnector,
    first_token_by_length,
    with_transfer,
)
from engines.endpoints import url_host

BOOTSTRAP_PORT = 8998
"""vLLM's default of VLLM_MOONCAKE_BOOTSTRAP_PORT."""


class Mooncake(SingleSequenceConnector):
    pushes = True

    def lacks(self, prefiller: Prefiller) -> str | None:
        if prefiller.dp_rank in prefiller.engine_ids:
            return None
        return (
            f"its bootstrap server {bootstrap_url(prefiller)} does not tell the engine id of rank {prefiller.dp_rank}"
        )

    def prefill(self, body: Body, handover: Handover) -> Body:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": handover.name}
        return with_transfer(first_token_by_length(body, handover.prefiller), params)

    def decode(self, body: Body, handover: Handover, returned: msgspec.Raw | None) -> Body:  # noqa: ARG002
        prefiller = handover.prefiller
        return with_transfer(
            body,
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_bootstrap_addr": bootstrap_url(prefiller),
                "remote_engine_id": prefiller.engine_ids[prefiller.dp_rank],
                "transfer_id": handover.name,
            },
        )


def bootstrap_url(prefiller: Prefiller) -> str:
    """Of the server whose GET /query `read_bootstrap` reads."""
    return f"http://{url_host(prefiller.host)}:{prefiller.bootstrap_port or BOOTSTRAP_PORT}"


def read_bootstrap(body: bytes) -> dict[int, str]:
    """Engine ids by data-parallel rank; {} for what is no such answer."""
    try:
        entries = _decode_entries(body)
    except UNDECODABLE:
        return {}
    return {int(rank): entry.engine_id for rank, entry in entries.items() if _RANK.fullmatch(rank)}


def own_engines(told: Mapping[int, str], first_rank: int, size: int) -> dict[int, str]:
    """`told` by a server's own ranks, of which there are `size`. Where several servers are one data-parallel engine
    (hybrid or external balancing) each has a bootstrap server for its own, which goes by their numbers among all."""
    if len(told) == size:
        return dict(enumerate(told[rank] for rank in sorted(told)))
    return {rank - first_rank: engine for rank, engine in told.items() if 0 <= rank - first_rank < size}


class _Entry(msgspec.Struct):
    engine_id: str


_RANK = re.compile("[0-9]{1,9}")
_decode_entries = msgspec.json.Decoder(dict[str, _Entry]).decode
