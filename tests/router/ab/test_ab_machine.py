from __future__ import annotations

from router.ab.machine import Meter, busy_ticks


def test_busy_ticks_leave_out_waiting_and_count_guests_once() -> None:
    stat = "cpu  100 20 30 4000 500 6 7 8 90 10\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    assert busy_ticks(stat) == 100 + 20 + 30 + 6 + 7 + 8


def test_a_meter_reads_what_was_used_since() -> None:
    meter = Meter()
    sum(range(200_000))
    cost = meter.read(chunks=3)
    assert cost.generator_cpu > 0
    assert cost.wall > 0
    assert (cost.children_cpu, cost.chunks) == (0.0, 3)
    assert cost.machine_cpu is None or cost.machine_cpu >= 0
