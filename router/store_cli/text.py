"""Figures for people."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[object]]) -> str:
    """A line for each row, its columns under each other."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)


def size(number: float) -> str:
    """Of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.{0 if unit == 'B' else 1}f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
