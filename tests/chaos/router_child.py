"""`python -m tests.chaos.router_child FILE FLAG…`: the router as it is, that on SIGUSR1 also writes to FILE, as JSON,
what only it can know: what its index holds, and what it still has open."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import router.app
import router.serve
from router.__main__ import main


class Telling(router.app.App):
    async def start(self) -> None:
        await super().start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._tell)

    def _tell(self) -> None:
        pools = [worker.pool for worker in self._fleet.workers.values()]
        session = self._session
        told = {
            "index": {
                f"{rank.worker_id}/{rank.dp_rank}/{tier.name}": [int(block) for block in blocks]
                for (rank, tier), blocks in self._indexer.index.dump().items()
            },
            "tasks": Counter(_kind(task) for task in asyncio.all_tasks()),
            "clients": len(self._clients.open),
            "upstream": sum(len(pool._open) for pool in pools),
            "kept": sum(map(len, session.connector._conns.values())) if session and session.connector else 0,
            "queue": len(self._queue),
        }
        new = FILE.with_suffix(".new")
        new.write_text(json.dumps(told))
        new.replace(FILE)


def _kind(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", type(coroutine).__name__)  # a compiled one has a type of its own


if __name__ == "__main__":
    FILE = Path(sys.argv[1])
    vars(router.serve)["App"] = Telling
    sys.exit(main(sys.argv[2:]))
