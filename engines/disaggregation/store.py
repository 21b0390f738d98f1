"""Connectors through which KV is shared by key (MooncakeStoreConnector, ExampleConnector, LMCache): nothing is told.

The prefill worker computes and saves, the decode worker finds what it needs under the blocks' own names.
"""

from __future__ import annotations

import msgspec

from engines.disaggregation.legs import (
    Body,
    Handover,
    Prefiller,
    first_token_only,
    length_matters,
    probabilities_of_prompt,
)


class Store:
    pushes = False

    def refuses(self, body: Body, room: int | None = None) -> str | None:
        return length_matters(body, room) or probabilities_of_prompt(body)

    def lacks(self, prefiller: Prefiller) -> str | None:  # noqa: ARG002 -- a Connector
        return None

    def together(self, prefiller: Prefiller) -> bool:  # noqa: ARG002 -- a Connector
        return False

    def prefill(self, body: Body, handover: Handover) -> Body:
        return first_token_only(body, handover.prefiller)

    def decode(self, body: Body, handover: Handover, returned: msgspec.Raw | None) -> Body:  # noqa: ARG002
        return body
