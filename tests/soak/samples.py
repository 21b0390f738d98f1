"""What is looked at every few seconds."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """Of one interval; `at`: seconds from the beginning to its end. Overhead: what the router adds to a request, in
    milliseconds; None where no probe came back."""

    at: float
    rss: float
    """Megabytes. (What is shared counts whole: its share would depend on who else runs.)"""
    descriptors: int
    requests: int
    """Answered in the interval."""
    in_flight: int
    p50: float | None
    p99: float | None
