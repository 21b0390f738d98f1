"""How a request is split in two: what the prefill worker is asked, what the decode worker is told, for each connector.

Pure: bodies in, bodies out. Which workers are taken, and when each leg is sent, is the router's business.
"""

from __future__ import annotations

from engines.disaggregation.legs import Body, Connector, Handover, Prefiller
from engines.disaggregation.mooncake import Mooncake
from engines.disaggregation.nixl import Nixl
from engines.disaggregation.nixl_push import NixlPush
from engines.disaggregation.sglang import Sglang
from engines.disaggregation.store import Store

CONNECTORS: dict[str, Connector] = {
    "nixl": Nixl(),
    "nixl-push": NixlPush(),
    "mooncake": Mooncake(),
    "store": Store(),
    "sglang": Sglang(),
}
"""By the names that `--worker …,connector=NAME` takes."""

__all__ = ["CONNECTORS", "Body", "Connector", "Handover", "Prefiller"]
