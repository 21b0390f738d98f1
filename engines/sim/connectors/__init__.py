"""What each connector wants on the wire of the two halves of a request: a file each, and what they share in `base`."""

from __future__ import annotations

from engines.sim.connectors.base import Connector
from engines.sim.connectors.mooncake import Mooncake
from engines.sim.connectors.nixl import Nixl
from engines.sim.connectors.nixl_push import NixlPush
from engines.sim.connectors.sglang import Sglang
from engines.sim.connectors.store import StoreConnector

CONNECTORS: dict[str, type[Connector]] = {
    "none": Connector,
    "nixl": Nixl,
    "nixl-push": NixlPush,
    "mooncake": Mooncake,
    "store": StoreConnector,
    "sglang": Sglang,
}
