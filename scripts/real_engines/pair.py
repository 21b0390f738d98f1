"""What makes a vLLM one half of a prefill/decode pair, over TCP on loopback and with KV in host memory."""

from __future__ import annotations

import json
import os
from typing import Any, Literal, NamedTuple

from .places import HERE

Connector = Literal["nixl", "mooncake"]
Role = Literal["prefill", "decode"]

SHIMS = HERE / "shims"
ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
CONNECTORS: dict[Connector, dict[str, Any]] = {
    "nixl": {
        "kv_connector": "NixlConnector",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"num_threads": 1},
    },
    "mooncake": {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"mooncake_protocol": "tcp"}},
}


class Half(NamedTuple):
    """`transfer_port`: of NIXL's side channel, or of Mooncake's bootstrap server, which the prefill half alone has."""

    connector: Connector
    role: Role
    transfer_port: int

    def arguments(self) -> list[str]:
        return ["--kv-transfer-config", json.dumps(CONNECTORS[self.connector] | {"kv_role": ROLES[self.role]})]

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(SHIMS), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": path, **self._addresses()}

    def _addresses(self) -> dict[str, str]:
        if self.connector == "mooncake":
            return {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.transfer_port)}
        return {
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.transfer_port),
        }
