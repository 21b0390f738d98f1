"""A worker as its peers know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.description import Role
from engines.endpoints import url_host
from engines.sim.faults import Faults


@dataclass(slots=True)
class Place:
    name: str
    role: Role
    host: str
    engine_ids: Sequence[str]
    """By data-parallel rank."""
    side_port: int
    """Where NIXL and Mooncake would meet, and the rank's number on top; nobody listens."""
    faults: Faults
    bootstrap_port: int = 0
    """0: it has no bootstrap server."""

    @property
    def bootstrap_url(self) -> str:
        return f"http://{url_host(self.host)}:{self.bootstrap_port}"

    def bootstrap_page(self) -> dict[str, Any]:
        """What GET /query of Mooncake's bootstrap server says."""
        return {
            str(rank): {"engine_id": name, "worker_addr": {"0": {"0": f"tcp://{self.host}:{self.side_port + rank}"}}}
            for rank, name in enumerate(self.engine_ids)
        }

    def identity(self, rank: int) -> dict[str, Any]:
        """How NIXL's parameters name a rank."""
        return {
            "remote_engine_id": self.engine_ids[rank],
            "remote_host": self.host,
            "remote_port": self.side_port + rank,
            "tp_size": 1,
        }
