"""CPU time of a process and all its descendants, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
# Positions in /proc/PID/stat after the name, which may hold blanks: ppid, utime, stime, cutime, cstime.
_PARENT, _TIMES = 1, slice(11, 15)


def read_stat(text: str) -> tuple[int, float]:
    """Parent and CPU seconds of a process, with those of its children that have ended."""
    fields = text.rpartition(")")[2].split()
    return int(fields[_PARENT]), sum(map(int, fields[_TIMES])) / _TICKS


def tree_seconds(pid: int, everything: dict[int, tuple[int, float]] | None = None) -> float:
    """User and system time of `pid`, its threads and its descendants. ProcessLookupError when it is gone."""
    known = _all_processes() if everything is None else everything
    return sum(known[each][1] for each in descendants(pid, known))


def descendants(pid: int, everything: dict[int, tuple[int, float]] | None = None) -> list[int]:
    """Of `pid`, itself first. ProcessLookupError when it is gone."""
    known = _all_processes() if everything is None else everything
    if pid not in known:
        raise ProcessLookupError(pid)
    children = [child for child, (parent, _) in known.items() if parent == pid]
    return [pid, *(each for child in children for each in descendants(child, known))]


def _all_processes() -> dict[int, tuple[int, float]]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = read_stat((entry / "stat").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
    return found
