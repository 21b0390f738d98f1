"""The audit of the index: silent before a fleet that is well, however hard it works, and not before one that is not."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest

from engines.sim.timing import StepTiming
from indexer.cursor import View
from indexer.types import Tier
from router.ab.trace import Row
from router.events.index_audit import DriftStatus
from router.simulation.fleet import FleetSettings
from router.simulation.run import find_policy
from tests.router.events.audited_fleet import AuditedFleet, SimPublisher

BLOCK = 128
FAST = StepTiming(
    base_s=0.005, prefill_tokens_per_s=1e5, attention_s_per_pair=0, decode_s_per_sequence=0, kv_read_s_per_token=0
)
PREFIXES, PARTS = 120, 4
"""Prompts that recur, and of how many times 512 tokens each is."""
ROOMY = 2_000_000
"""Tokens: nothing is ever evicted."""
SICK = 0


def traffic(seconds: float, rate: float, seed: int = 1) -> list[Row]:
    """Prompts that begin as others did and end as none did."""
    draw = random.Random(seed)
    rows: list[Row] = []
    at = 0.0
    while at < seconds:
        at += draw.expovariate(rate)
        prefix = draw.randrange(PREFIXES) * PARTS
        rows.append(Row(at * 1000, PARTS * 512 + 300, 8, (*range(prefix, prefix + PARTS), 10_000_000 + len(rows))))
    return rows


def fleet_of(cache_tokens: int = ROOMY, policy: str = "auto") -> AuditedFleet:
    settings = FleetSettings(workers=2, cache_tokens=cache_tokens, block_size=BLOCK, timing=FAST)
    return AuditedFleet(settings, find_policy(policy))


def drift(fleet: AuditedFleet, worker: int) -> DriftStatus:
    found = fleet.audit.status(fleet.ranks[worker])
    assert found is not None
    return found


def at(seconds: float, change: Callable[[AuditedFleet], None]) -> Callable[[AuditedFleet], None]:
    def plan(fleet: AuditedFleet) -> None:
        fleet.timeline.call_at(seconds, change, fleet)

    return plan


def sick_publisher(fleet: AuditedFleet) -> SimPublisher:
    return fleet.publishers[fleet.ranks[SICK]]


def index_is_right(fleet: AuditedFleet, worker: int) -> bool:
    rank = fleet.ranks[worker]
    return fleet.index.dump().get((rank, Tier.GPU), set()) == fleet.publishers[rank].held


@pytest.mark.parametrize(
    ("cache_tokens", "rate"),
    [(ROOMY, 10.0), (ROOMY, 60.0), (30_000, 10.0), (30_000, 60.0), (10_000, 30.0)],
    ids=["roomy", "busy", "evicting", "evicting and busy", "thrashing"],
)
def test_a_healthy_fleet_never_drifts(cache_tokens: int, rate: float) -> None:
    fleet = fleet_of(cache_tokens)
    fleet.run(traffic(20, rate))
    judged = [found.requests for found in fleet.audit._drifts.values()]
    assert sum(judged) > 0.5 * 20 * rate
    assert (fleet.audit.alarms, fleet.worst) == (0, 0.0)


def test_events_lost_in_silence_raise_one_alarm_and_the_rebuild_puts_it_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet, draw = fleet_of(), random.Random(3)

    def begin(fleet: AuditedFleet) -> None:
        sick_publisher(fleet).loses = lambda: draw.random() < 0.8
        at(60, end)(fleet)

    def end(fleet: AuditedFleet) -> None:
        sick_publisher(fleet).loses = lambda: False
        assert not index_is_right(fleet, SICK)

    with caplog.at_level(logging.INFO):
        fleet.run(traffic(180, 6), lambda _: begin(fleet))
    assert (fleet.audit.alarms, fleet.asked) == (1, [fleet.ranks[SICK]])
    assert drift(fleet, SICK) == drift(fleet, 1) == DriftStatus(0.0, 0.0, alarm=False)
    assert index_is_right(fleet, SICK)
    told = [
        (record.levelname, record.message) for record in caplog.records if record.name == "router.events.index_audit"
    ]
    assert told == [
        ("WARNING", "The index drifts from what a rank holds"),
        ("INFO", "A rank's part of the index is rebuilt from what its publisher holds"),
        ("INFO", "The index drifts no longer"),
    ]


def test_hashes_that_nobody_else_makes_raise_one_alarm_which_stands(caplog: pytest.LogCaptureFixture) -> None:
    """Another seed, or another block size: whatever is rebuilt is as wrong as before."""
    fleet = fleet_of()

    def begin(fleet: AuditedFleet) -> None:
        sick_publisher(fleet).seed = 0x5EED

    fleet.run(traffic(400, 5), lambda _: begin(fleet))
    assert (fleet.audit.alarms, fleet.asked) == (1, [fleet.ranks[SICK]])
    found = drift(fleet, SICK)
    assert found.alarm
    assert found.ratio == -found.bias > 0.5
    assert drift(fleet, 1).ratio == 0
    assert len([record for record in caplog.records if record.name == "router.events.index_audit"]) == 1
    assert fleet.indexer.view(fleet.ranks[SICK]) is View.EXACT


def test_an_engine_that_began_anew_with_its_old_events_standing_is_learned_anew() -> None:
    """Its publisher has not noticed, so what it says of everything is as wrong: then only what comes counts."""
    fleet = fleet_of(policy="round-robin")  # others would send nothing to a rank of which nothing is known
    alarms = []

    def restart(fleet: AuditedFleet) -> None:
        if fleet.indexer.view(fleet.ranks[SICK]) is View.EXACT:
            fleet.forget_silently(fleet.ranks[SICK])

    def plan(fleet: AuditedFleet) -> None:
        for moment in range(60, 200, 3):  # again and again, or each prompt would be wrong only once
            at(moment, restart)(fleet)
        at(199, lambda fleet: alarms.append(drift(fleet, SICK).alarm))(fleet)

    fleet.run(traffic(600, 5), lambda _: plan(fleet))
    assert alarms == [True]
    assert (fleet.audit.alarms, fleet.asked) == (1, [fleet.ranks[SICK]])
    assert not drift(fleet, SICK).alarm
    assert fleet.indexer.view(fleet.ranks[SICK]) is View.PARTIAL
    known = fleet.index.dump()[fleet.ranks[SICK], Tier.GPU]
    assert known
    assert known <= set(fleet.workers[fleet.ranks[SICK]].scheduler.cache._block)


def test_where_nobody_can_tell_anew_the_rank_is_learned_again() -> None:
    fleet, draw = fleet_of(), random.Random(3)
    views = []

    def begin(fleet: AuditedFleet) -> None:
        sick_publisher(fleet).answers = False
        sick_publisher(fleet).loses = lambda: draw.random() < 0.8
        at(60, end)(fleet)
        at(180, lambda fleet: views.append(fleet.indexer.view(fleet.ranks[SICK])))(fleet)

    def end(fleet: AuditedFleet) -> None:
        sick_publisher(fleet).loses = lambda: False

    fleet.run(traffic(480, 6), lambda _: begin(fleet))
    assert views == [View.RECOVERING]
    assert fleet.asked == [fleet.ranks[SICK]]
    assert not drift(fleet, SICK).alarm
    assert fleet.indexer.view(fleet.ranks[SICK]) is View.PARTIAL
