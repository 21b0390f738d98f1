"""Pipes in the place of files, such as a shell's `<(…)`, which can be read only once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def is_pipe(file: Path) -> bool:
    """Opened again, it is empty at best, and at worst its opening never ends."""
    try:
        return file.is_fifo()
    except (OSError, ValueError):  # which reading it explains
        return False


def refuse_pipes(files: Iterable[tuple[str, str | None]]) -> None:
    """Each with its flag. Raises ValueError."""
    for flag, path in files:
        if path is not None and is_pipe(Path(path)):
            raise ValueError(f"{flag}: {path} is a pipe, and is read more than once; name a file.")
