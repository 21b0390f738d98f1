"""Pipes in the place of files, such as a shell's `<(…)`, which can be read only once."""

from __future__ import annotations

from pathlib import Path


def is_pipe(file: Path) -> bool:
    """Opened again, it is empty at best, and at worst its opening never ends."""
    try:
        return file.is_fifo()
    except (OSError, ValueError):  # which reading it explains
        return False
