"""What goes wrong, how often, and in which fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ANSWERS = {
    "error500": 1.5,
    "error503": 1.5,
    "error429": 1.0,
    "drop_before_first_byte": 2.0,
    "break_after_tokens": 2.0,
    "hang": 0.3,
    "slow": 0.3,
}
"""Times a second that engines are told to misbehave, as in `engines.sim.faults`."""
CONNECTIONS = {"cut": 5.0, "stall": 0.2, "delay": 0.3, "throttle": 0.3, "refuse": 0.2, "lossy": 0.3}
"""What happens between the router and a worker."""
WORKERS = {"worker_kill": 0.2, "worker_stop": 0.2}
PUBLISHERS = {"publisher_kill": 0.4, "publisher_stop": 0.3, "nats_kill": 0.15, "nats_stop": 0.1}
ROUTER = {"router_kill": 0.08, "router_drain": 0.08, "router_stop": 0.1}
SETTINGS = {"hangup": 0.3}
"""A worker taken out of the settings and stated again, each with a hangup."""
PROCESSES = {"process_kill": 0.2, "process_stop": 0.2}
"""Of the several that the router has."""
SOME = {"error500": 2.0, "drop_before_first_byte": 1.0, "break_after_tokens": 1.0, "cut": 2.0}
"""Beside what a scenario is about."""
PATIENCE = ("--first-byte-timeout", "5", "--idle-timeout", "6", "--stall-timeout", "4", "--request-timeout", "25")
"""Flags of the router, so that what hangs and freezes here for seconds counts."""
NO_BREAKER = ("--breaker-failures", "1000")
"""So that a worker that fails goes on being asked, and faults find requests."""


class Scenario(NamedTuple):
    name: str
    about: str
    rates: Mapping[str, float]
    """Kind of fault to how often it is drawn a second."""
    workers: int = 4
    beds: int = 1
    """Workers that may be ill at a time."""
    nats: bool = False
    processes: int = 1
    """Of the router."""
    clients: int = 16
    pause: float = 0.1
    """Mean seconds between a client's requests."""
    flags: tuple[str, ...] = PATIENCE
    """Of the router."""
    share: float = 1.0
    """Of the time, beside others: cheap faults get more, as they are the many."""


SCENARIOS = {
    one.name: one
    for one in (
        Scenario(
            "answers",
            "Engines that answer wrongly, not at all, or by half.",
            ANSWERS,
            flags=(*PATIENCE, *NO_BREAKER),
            share=3,
        ),
        Scenario("connections", "Connections that break, stall, crawl, or cannot be made.", CONNECTIONS, share=2),
        Scenario("workers", "Workers that die, freeze and come back.", {**WORKERS, **SOME}),
        Scenario(
            "events",
            "Publishers and NATS that die and freeze.",
            {**PUBLISHERS, **WORKERS, **SOME},
            nats=True,
        ),
        Scenario("router", "The router itself, killed, ended and frozen.", {**ROUTER, **SOME}),
        Scenario("settings", "Workers that join and leave.", {**SETTINGS, **WORKERS, **SOME}),
        Scenario(
            "processes",
            "Several router processes, one of them killed or frozen, and workers that join and leave.",
            {**PROCESSES, **SETTINGS, **WORKERS, **SOME},
            processes=3,
        ),
        Scenario(
            "everything",
            "All of it at once, with three of four workers ill.",
            {**ANSWERS, **CONNECTIONS, **WORKERS, **PUBLISHERS, **ROUTER, **SETTINGS},
            beds=3,
            nats=True,
        ),
    )
}
