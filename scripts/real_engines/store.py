"""What makes vLLMs share their blocks through a Mooncake Store, over TCP on loopback and in host memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from .pair import SHIMS

CONNECTOR = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
LEASE_MS = 5000


def master_arguments(rpc_port: int, http_port: int) -> list[str]:
    return [
        *("--rpc_address=127.0.0.1", f"--rpc_port={rpc_port}"),
        *("--metrics_host=127.0.0.1", f"--metrics_port={http_port}"),
        *(f"--default_kv_lease_ttl={LEASE_MS}", "--eviction_high_watermark_ratio=0.90", "--eviction_ratio=0.10"),
        *("--rpc_thread_num=2", "--logtostderr"),
    ]


class Member(NamedTuple):
    """A vLLM that offers a segment of its memory to the store of a master, and puts its blocks there."""

    master_port: int
    segment: str = "256MB"

    def arguments(self) -> list[str]:
        """The `port` only names a socket in /tmp, which two engines that start together would take from each other."""
        extra = {"load_async": True, "lookup_rpc_port": os.getpid()}
        return ["--kv-transfer-config", json.dumps({**CONNECTOR, "kv_connector_extra_config": extra})]

    def environment(self, folder: Path) -> dict[str, str]:
        """`folder`: for the file that the connector reads."""
        path = os.pathsep.join(filter(None, [str(SHIMS), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": path, "MOONCAKE_CONFIG_PATH": str(self._write(folder))}

    def _write(self, folder: Path) -> Path:
        """The same for all members of a master."""
        config = {
            "mode": "embedded",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{self.master_port}",
            "global_segment_size": self.segment,
            "local_buffer_size": "64MB",
            "protocol": "tcp",
            "device_name": "",
        }
        file = folder / f"store-{self.master_port}.json"
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(config))
        new.replace(file)
        return file
