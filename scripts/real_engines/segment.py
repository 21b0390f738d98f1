"""Memory for a store and nothing else: `python segment.py HOST MASTER_HOST:PORT MB`, with Mooncake's own Python."""

from __future__ import annotations

import signal
import sys

from mooncake.store import MooncakeDistributedStore

MB = 1 << 20


def main(host: str, master: str, megabytes: str) -> int:
    store = MooncakeDistributedStore()
    if code := store.setup(host, "P2PHANDSHAKE", int(megabytes) * MB, 16 * MB, "tcp", "", master):
        return abs(int(code))
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
