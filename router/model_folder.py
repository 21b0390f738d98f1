"""Folders that an engine names: whether the router may look there, and at what. An engine may name any path, and what
it names may be anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MOST_BYTES = 256 * 1024**2
"""Of a file; the largest tokenizer.json known takes some 35 MB."""


def may_read(folder: str, within: Sequence[str]) -> bool:
    """Whether it is one of the folders `within`, or in one, wherever links lead; or none are given."""
    try:
        real = Path(folder).resolve()
        return not within or any(real.is_relative_to(Path(root).resolve()) for root in within)
    except (OSError, ValueError, RuntimeError):  # no path at all, or links in a ring
        return False


def holds(folder: Path, name: str) -> bool:
    """A plain file of a size that can be; the path is absolute."""
    try:
        file = folder / name
        return folder.is_absolute() and file.is_file() and file.stat().st_size <= MOST_BYTES
    except (OSError, ValueError):
        return False
