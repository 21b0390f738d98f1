"""Measures how busy the whole machine is: other load on its cores distorts a run."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from time import perf_counter, process_time

import msgspec

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Columns of /proc/stat's first line, after its name: idle, iowait."""
_COUNTED = 8
"""Columns that are added up: the last two, of guests, repeat what user and nice count."""


class Cost(msgspec.Struct, frozen=True):
    """What a mode cost: seconds of wall and CPU time, and the number of stream chunks received."""

    wall: float
    generator_cpu: float
    children_cpu: float
    """CPU seconds of router and simulated fleet; 0 where there was neither."""
    machine_cpu: float | None
    """CPU seconds of all processes on this machine, with time stolen by its host; None where not known."""
    cores: int
    chunks: int

    @property
    def own_busy(self) -> float:
        """The share of the machine's cores that this run used, 0–1."""
        return self._share(self.generator_cpu + self.children_cpu)

    @property
    def busy(self) -> float:
        """The share of the machine's cores in use by any process, 0–1; this run's own share where that is unknown."""
        return self.own_busy if self.machine_cpu is None else self._share(self.machine_cpu)

    def _share(self, seconds: float) -> float:
        return seconds / (self.wall * self.cores) if self.wall else 0.0


class Meter:
    """Measures from its creation; `read` returns what has been used since."""

    def __init__(self) -> None:
        self._wall, self._own, self._children = perf_counter(), process_time(), _children_cpu()
        self._machine = _machine_cpu()

    def read(self, chunks: int) -> Cost:
        """The cost so far. Child processes are counted once they have ended."""
        now = _machine_cpu()
        return Cost(
            wall=perf_counter() - self._wall,
            generator_cpu=process_time() - self._own,
            children_cpu=_children_cpu() - self._children,
            machine_cpu=None if now is None or self._machine is None else now - self._machine,
            cores=os.cpu_count() or 1,
            chunks=chunks,
        )


def busy_ticks(stat: str) -> int:
    """Clock ticks in which any core was not idle, from the text of /proc/stat."""
    columns = [int(column) for column in stat.partition("\n")[0].split()[1 : 1 + _COUNTED]]
    return sum(columns) - sum(columns[index] for index in _IDLE)


def _machine_cpu() -> float | None:
    try:
        return busy_ticks(_STAT.read_text()) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
