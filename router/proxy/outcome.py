"""How a request ended, and how long a worker has kept it waiting meanwhile."""

from __future__ import annotations

from typing import Literal, NamedTuple

from router.proxy.legs import Leg, Parted
from router.workers.worker import Worker

End = Literal["complete", "broken", "cancelled", "failed"]


class Outcome(NamedTuple):
    """How a request ended. Times are seconds since it was read; None where it never came to that."""

    leg: Leg | None
    status: int
    end: End
    first_byte: float | None
    duration: float
    prompt_tokens: int | None
    cached_tokens: int | None
    """As the engine reported them; of a split request, the engine that prefilled."""
    parted: Parted | None = None

    @property
    def is_error(self) -> bool:
        """Whether the answer, which was passed on completely, is a worker's error."""
        return self.end == "complete" and self.status >= 400


class Silence(NamedTuple):
    """A worker has sent nothing for an exchange since `since`."""

    worker: Worker
    since: float
    """When its last piece came, or when it was sent the request."""
    owed: Literal["prefill", "beginning", "rest"]
    """What is expected next: the whole answer of a prefill, of which nothing comes before; the beginning of an answer;
    or more of it."""
    moved: bool
    """Whether something has come since the watchdog's last check."""
