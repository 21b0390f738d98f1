"""A request as the queue sees it."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from indexer.matches import Matches
from router.scheduling.admission import QueueFull, QueueTimeout, Refusal
from router.scheduling.booking import Booking
from router.scheduling.candidates import Candidates
from router.scheduling.decision import Decision, Policy
from router.scheduling.others import Others

AnyRefusal: TypeAlias = Refusal | QueueFull | QueueTimeout


class Waiting(Protocol):
    """A request that may have to wait. Unless it is withdrawn before, or choosing for it fails at once, exactly one of
    `send`, `refuse`, `no_candidates` and `fail` is called, once."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def others(self) -> Others:
        """Its further prompts and answers; everything else here is about its first prompt."""

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter that it asks for."""

    @property
    def arrived(self) -> float: ...
    @property
    def priority(self) -> int:
        """The smaller, the sooner; 0 is usual."""

    @property
    def tenant(self) -> str:
        """Who sent it: tenants get fair shares. Requests of nobody in particular are those of the tenant ""."""

    @property
    def pinned(self) -> bool:
        """Whether it named its worker, so that all candidates are ranks of that worker. It waits for nothing but room
        there."""

    @property
    def ttft_slo(self) -> float | None:
        """Seconds; None: the general objectives hold. `math.inf`: none do."""

    @property
    def stored_tokens(self) -> int:
        """How many of the prompt's leading tokens are in a shared store."""

    @property
    def streamed(self) -> bool:
        """Whether its first token will be seen."""

    @property
    def policy(self) -> Policy | None:
        """None: the scheduler's own."""

    def candidates(self) -> Candidates:
        """The ranks that can serve it now; there may be none."""

    def matches(self) -> Matches | None: ...
    def send(self, decision: Decision, booking: Booking) -> None: ...
    def refuse(self, refusal: AnyRefusal) -> None: ...
    def no_candidates(self) -> None:
        """There is no candidate, or none any more."""

    def fail(self, error: Exception) -> None:
        """Choosing for it raised an error: it is held no longer."""
