"""Workers that come, go and slow down while requests are under way."""

from __future__ import annotations

import pytest

from engines.sim.timing import StepTiming
from router.ab.trace import Row
from router.scheduling.admission import Admission, Objectives
from router.scheduling.balance import LeastLoaded, RoundRobin
from router.simulation.arrival import Sample
from router.simulation.changes import Change, parse_change, parse_slow, plan_changes, unknown_worker
from router.simulation.fleet import FleetSettings, VirtualFleet
from router.simulation.parts import HOP

TIMING = StepTiming(
    base_s=0.01, prefill_tokens_per_s=1e4, attention_s_per_pair=0, decode_s_per_sequence=0, kv_read_s_per_token=0
)
SETTINGS = FleetSettings(workers=2, cache_tokens=65_536, timing=TIMING)


def row(at: float, number: int, prompt: int = 1024, answer: int = 101) -> Row:
    """Of content that no other has: 0.11 s to the first token, and 1 s for the others, if it is alone."""
    return Row(at * 1000, prompt, answer, tuple(range(number * 1000, number * 1000 + -(-prompt // 512))))


def run(rows: list[Row], *changes: str, workers: int = 2) -> list[Sample]:
    fleet = VirtualFleet(SETTINGS._replace(workers=workers), RoundRobin())
    planned = [parse_change(text) for text in changes]
    samples = fleet.run(rows, lambda fleet: plan_changes(fleet, planned))
    return sorted(samples)


def test_times_are_the_models() -> None:
    (sample,) = run([row(1.0, 0)])
    assert sample.ttft == pytest.approx(0.01 + 0.1024 + 2 * HOP)
    assert sample.tpot == pytest.approx(0.01)
    assert (sample.fate, sample.worker, sample.cached_tokens) == ("answered", 0, 0)


def test_who_has_no_first_token_goes_elsewhere_from_the_beginning() -> None:
    (sample,) = run([row(1.0, 0)], "1.05:kill:0")
    assert (sample.fate, sample.worker) == ("answered", 1)
    assert sample.ttft == pytest.approx(0.05 + HOP + 0.01 + 0.1024 + 2 * HOP)


def test_who_has_one_has_failed() -> None:
    (sample,) = run([row(1.0, 0)], "1.5:kill:0")
    assert (sample.fate, sample.worker, sample.tpot) == ("failed", 0, None)
    assert sample.last == pytest.approx(1.5 + HOP)


def test_the_second_worker_to_fail_is_the_last() -> None:
    (sample,) = run([row(1.0, 0)], "1.05:kill:0", "1.1:kill:1", workers=3)
    assert (sample.fate, sample.first, sample.worker) == ("failed", None, 1)


def test_nobody_is_left() -> None:
    first, second = run([row(1.0, 0), row(2.0, 1)], "1.05:kill:0", workers=1)
    assert (first.fate, second.fate) == ("failed", "failed")
    assert second.worker == -1


def test_a_request_on_its_way_to_a_dead_worker_is_lost_with_the_others() -> None:
    (sample,) = run([row(1.0, 0)], "0.9995:kill:0")
    assert (sample.fate, sample.worker) == ("answered", 1)


def test_books_are_clean_after_a_worker_died() -> None:
    fleet = VirtualFleet(SETTINGS, LeastLoaded())
    rows = [row(1.0 + number / 10, number) for number in range(10)]
    samples = fleet.run(rows, lambda fleet: plan_changes(fleet, [parse_change("1.35:kill:1")]))
    assert len(samples) == 10
    assert {sample.fate for sample in samples} == {"answered", "failed"}
    survivor = fleet.ranks[0]
    assert fleet.scheduler.book.load(survivor, fleet.timeline.now()).requests == 0
    assert fleet.scheduler.backlog.busy(fleet.candidates, fleet.timeline.now()) == 0
    assert not fleet.index.blocks(fleet.ranks[1], next(iter(fleet.index.dump()))[1])


def test_a_drained_worker_finishes_and_gets_nothing_new() -> None:
    samples = run([row(at, int(10 * at)) for at in (1.0, 1.1, 1.5, 1.6)], "1.3:drain:1")
    assert [sample.worker for sample in samples] == [0, 1, 0, 0]
    assert {sample.fate for sample in samples} == {"answered"}


def test_who_joins_is_used() -> None:
    samples = run([row(at, int(10 * at)) for at in (1.0, 1.1, 1.5, 1.6)], "1.3:join:1", workers=1)
    assert [sample.worker for sample in samples] == [0, 0, 1, 0]


def test_a_worker_slows_down_from_its_next_step_on() -> None:
    (sample,) = run([row(1.0, 0, answer=11)], "1.05:slow:0=3")
    assert sample.ttft == pytest.approx(0.01 + 0.1024 + 2 * HOP)
    assert sample.tpot == pytest.approx(0.03)


def test_refused_and_failed_are_told_apart() -> None:
    admission = Admission(Objectives(ttft=0.05))
    fleet = VirtualFleet(SETTINGS._replace(workers=1), RoundRobin(), admission=admission)
    fates = [sample.fate for sample in sorted(fleet.run([row(1.0, 0), row(1.01, 1)]))]
    assert fates == ["answered", "refused"]


def test_a_run_may_end_early() -> None:
    fleet = VirtualFleet(SETTINGS, RoundRobin())
    rows = [row(number, number) for number in range(20)]
    assert 3 <= len(fleet.run(rows, enough=lambda samples: len(samples) >= 3)) < 10


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("120:slow:3=3", Change(120, "slow", 3, 3)),
        ("0.5:kill:0", Change(0.5, "kill", 0)),
        ("7:join:2", Change(7, "join", 2)),
        ("7:drain:2", Change(7, "drain", 2)),
    ],
)
def test_changes_are_read(text: str, change: Change) -> None:
    assert parse_change(text) == change


@pytest.mark.parametrize(
    "text", ["", "1:kill", "1:kill:1=2", "1:slow:1", "1:slow:1=0", "-1:kill:0", "1:kill:-1", "1:join:0", "1:burn:0"]
)
def test_what_is_no_change_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_change(text)


def test_slow_workers_are_read() -> None:
    assert parse_slow("3=2.5") == (3, 2.5)
    for text in ("3", "3=0", "-1=2", "x=1"):
        with pytest.raises(ValueError):
            parse_slow(text)


def test_a_change_may_name_a_worker_that_has_joined_by_then() -> None:
    changes = [parse_change("5:kill:2"), parse_change("3:join:1")]
    assert unknown_worker(2, changes) is None
    assert unknown_worker(1, changes) == 2


def test_changes_of_one_moment_are_made_in_the_order_given() -> None:
    """What is checked before the run is what happens in it."""
    for named_first in (["1:kill:2", "1:join:1"], ["1:slow:2=2", "1:join:1"]):
        assert unknown_worker(2, map(parse_change, named_first)) == 2
    joined_first = ["1:join:1", "1:drain:2"]
    assert unknown_worker(2, map(parse_change, joined_first)) is None
    (sample,) = run([row(2.0, 0)], *joined_first)
    assert sample.fate == "answered"
