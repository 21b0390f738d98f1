"""When each engine's turn comes, where hundreds of them are asked every so often.

All that begins together would go on together: with a thousand workers the event loop stood still for a tenth of a
second, each second, while it sent all their requests.
"""

from __future__ import annotations

import zlib

EARLY = 0.005
"""Seconds by which a timer may go off too early: libuv's count whole milliseconds. What is done quickly would have its
turn twice."""


def until_turn(name: str, interval: float, now: float) -> float:
    """Seconds until the next turn of the engine of that name, more than 0. Its turns are `interval` seconds apart.
    `now`: seconds on a steady clock."""
    phase = zlib.crc32(name.encode()) / 2**32
    left = interval * (1.0 - (now / interval - phase) % 1.0)
    return left if left > min(EARLY, interval / 2) else left + interval
