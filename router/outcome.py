"""What becomes of a request, and what a worker owes it meanwhile."""

from __future__ import annotations

from typing import Literal, NamedTuple

from router.fleet import Worker
from router.legs import Leg, Parted

End = Literal["complete", "broken", "cancelled", "failed"]


class Outcome(NamedTuple):
    """What became of a request; times in seconds since it was read, None where it never came to that."""

    leg: Leg | None
    status: int
    end: End
    first_byte: float | None
    duration: float
    prompt_tokens: int | None
    cached_tokens: int | None
    """As the engine reported them: the one that prefilled, where another decoded."""
    parted: Parted | None = None


class Silence(NamedTuple):
    """How long a worker owes an exchange something."""

    worker: Worker
    since: float
    """When its last piece came, or the request went to it."""
    owed: Literal["prefill", "beginning", "rest"]
    """What comes next: the whole of its part, of which nothing shows before; the first of an answer; more of it."""
    moved: bool
    """Something has come since the last look."""
