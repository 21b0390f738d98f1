"""Who is told of a connection that does not come about."""

from __future__ import annotations

import asyncio

from router.http.pool import NoConnection, Pool
from router.http.upstream import WorkerConnection


class Wanting:
    def __init__(self, pool: Pool) -> None:
        self.told: list[WorkerConnection | NoConnection] = []
        self.task = pool.connect(self.told.append, self.told.append)


async def test_whoever_waits_for_a_connection_when_its_worker_is_cut_off_is_told_once() -> None:
    pool = Pool("http://127.0.0.1:9", 60.0)
    waits, has_left = Wanting(pool), Wanting(pool)
    has_left.task.cancel()
    pool.cut("it was removed")
    await asyncio.gather(waits.task, has_left.task, return_exceptions=True)
    assert waits.told == [NoConnection("it was removed")]
    assert has_left.told == []
