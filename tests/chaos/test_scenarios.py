"""Short scenarios: long ones are `python -m tests.chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.simulation.fleet import VirtualFleet
from tests.chaos.run import run_scenario
from tests.chaos.scenarios import SOME, Scenario
from tests.chaos.virtual import run_virtual


@pytest.mark.parametrize("policy", ["auto", "overlap", "round-robin"])
def test_virtual_workers_come_and_go(policy: str) -> None:
    ledger = run_virtual(600, 30, 1, policy)
    assert ledger.violations == []
    assert ledger.faults.total() > 10
    assert ledger.fates["answered"] > 500
    assert ledger.carried == 600


def test_virtual_blocks_of_the_dead_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.prefix_index.PrefixIndex.clear", lambda *_: None)
    assert "the index of" in run_virtual(200, 30, 1).violations[0]


def test_virtual_requests_that_are_lost_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = VirtualFleet.run
    monkeypatch.setattr(VirtualFleet, "run", lambda *given: run(*given)[3:])
    ledger = run_virtual(200, 5, 1)
    assert ledger.lost == 3
    assert "3 without any" in ledger.violations[0]


def test_virtual_bookings_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.scheduling.booking.Booking.release", lambda *_: None)
    assert any("still booked" in violation for violation in run_virtual(100, 2, 1).violations)


@pytest.mark.slow
# A server of asyncio that is closed while a connection reaches it forgets its socket (python/cpython#109564).
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
async def test_real_engines_that_answer_wrongly(tmp_path: Path) -> None:
    """Processes and sockets, for some seconds."""
    ledger = await run_scenario(Scenario("short", "", SOME, workers=2, clients=4, pause=0.02), 3, 1, tmp_path)
    assert ledger.violations == []
    assert ledger.fates["answered"] > 10
    assert ledger.faults.total() > 3
