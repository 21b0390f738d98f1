"""When each engine's turn comes, where hundreds of them are asked every so often.

All that begins together would go on together: with a thousand workers the event loop stood still for a tenth of a
second, each second, while it sent all their requests.
"""

from __future__ import annotations

import zlib


def until_turn(name: str, interval: float, now: float) -> float:
    """Seconds until the next turn of the engine of that name, more than 0. Its turns are `interval` seconds apart.
    `now`: seconds on a steady clock."""
    phase = zlib.crc32(name.encode()) / 2**32
    return interval * (1.0 - (now / interval - phase) % 1.0)
