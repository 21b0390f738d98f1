"""Connectors through which KV is shared by key (MooncakeStoreConnector, ExampleConnector, LMCache): nothing is told.

The prefill worker computes and saves, the decode worker finds what it needs under the blocks' own names.
"""

from __future__ import annotations

import msgspec

from engines.disaggregation.legs import Body, Connector, Handover, first_token_only


class Store(Connector):
    def prefill(self, body: Body, handover: Handover) -> Body:
        return first_token_only(body, handover.prefiller)

    def decode(self, body: Body, handover: Handover, returned: msgspec.Raw | None) -> Body:  # noqa: ARG002
        return body
