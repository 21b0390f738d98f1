"""Comments in silent streams, so that proxies between here and a client do not take its connection for dead."""

from __future__ import annotations

from collections.abc import Collection

from router.proxy.exchange import Exchange


class Comments:
    def __init__(self, interval: float, under_way: Collection[Exchange]) -> None:
        """`interval`: seconds of silence. `under_way`: the exchanges that go on at the moment."""
        self._interval = interval
        self._under_way = under_way

    def tick(self, now: float) -> None:
        """To be called once a second, after the watchdog, who notices what has come. `now`: seconds on a steady
        clock."""
        for exchange in self._under_way:
            if exchange.commented and now - exchange.last_sent >= self._interval:
                exchange.comment(now)
