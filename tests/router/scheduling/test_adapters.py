"""Where a request for a LoRA adapter would wait for a slot, and that such requests go where their adapter runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from indexer.events import LoadReport
from router.scheduling.adapters import Adapters
from router.scheduling.auto import Auto
from router.scheduling.cheapest import Cheapest
from tests.router.scheduling.candidates import named, rank
from tests.router.scheduling.waiting import Desk

A, B = rank("a"), rank("b")


def report(name: str, slots: int | None) -> LoadReport:
    return LoadReport(name, 0, 1, -1, True, lora_total_slots=slots)


def running(slots: int | None, *adapters: str) -> Adapters:
    book = Adapters()
    book.on_report(report("a", slots))
    for adapter in adapters:
        book.begin(A, adapter)
    return book


def wait(book: Adapters, adapter: str) -> float:
    """With requests that take 12 s."""
    waits: Sequence[float] = book.waits(named("ab"), adapter, 12.0).tolist()
    assert waits[1] == 0.0, "nothing is known of b"
    return waits[0]


@pytest.mark.parametrize(
    ("slots", "adapters", "asked", "seconds"),
    [
        (None, "vwxyz", "n", 0.0),
        (2, "", "n", 0.0),
        (2, "x", "n", 0.0),
        (2, "xy", "n", 6.0),  # the first of two to end
        (2, "xxyy", "n", 12.0),
        (2, "xxxy", "n", 6.0),  # y has one request left
        (2, "xyz", "n", 12.0),  # z comes first
        (2, "xyz", "z", 6.0),
        (2, "xyz", "x", 0.0),
        (1, "x", "x", 0.0),
        (1, "x", "n", 12.0),
    ],
)
def test_how_long_an_adapter_waits(slots: int | None, adapters: str, asked: str, seconds: float) -> None:
    assert wait(running(slots, *adapters), asked) == seconds


def test_a_slot_is_free_when_all_requests_of_its_adapter_have_ended() -> None:
    book = running(1, "x", "x")
    book.end(A, "x")
    assert wait(book, "y") == 12.0
    book.end(A, "x")
    assert wait(book, "y") == 0.0
    book.begin(A, "y")
    assert wait(book, "x") == 12.0


def test_an_engine_that_comes_back_tells_anew_how_many_it_runs() -> None:
    book = running(1, "x")
    book.on_report(report("a", None))
    assert wait(book, "y") == 12.0, "a report without the figure changes nothing"
    book.forget(A)
    assert wait(book, "y") == 0.0
    book.end(A, "x")
    book.on_report(report("a", 1))
    assert wait(book, "y") == 0.0


def desk() -> Desk:
    """Two workers that run one adapter each at a time."""
    made = Desk(Cheapest(Auto()), "ab")
    for name in "ab":
        made.scheduler.book.on_report(report(name, 1), made.clock.now)
    return made


def test_requests_go_where_their_adapter_runs() -> None:
    made = desk()
    for adapter in "xyxyxxxx":
        made.ask(adapter, adapter=adapter)
    where = {(request.name, request.decision.rank) for request in made.sent if request.decision}
    assert len(made.sent) == 8
    assert len(where) == 2, "whatever else b has to do"


def test_who_needs_another_adapter_waits_in_the_router() -> None:
    made = desk()
    x, y = (made.ask(adapter, adapter=adapter) for adapter in "xy")
    z, plain = made.ask("z", adapter="z"), made.ask("-")
    assert (z.fate, plain.fate) == ("waits", "sent"), "the base model needs no slot"
    y.end()
    assert z.fate == "sent"
    assert z.decision
    assert y.decision
    assert z.decision.rank == y.decision.rank
    for request in (x, z, plain):
        request.end()
    assert made.at_rest


def test_a_worker_that_is_idle_takes_any_adapter() -> None:
    """Others may hold its slots for ever."""
    made = desk()
    assert [made.ask(adapter, adapter=adapter).fate for adapter in "xy"] == ["sent", "sent"]
