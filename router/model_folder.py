"""Whether the router may read a folder that an engine names, and a file in it: an engine may name any path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MOST_BYTES = 256 * 1024**2
"""The largest file that is read; the largest tokenizer.json known takes some 35 MB."""


def may_read(folder: str, within: Sequence[str]) -> bool:
    """Whether the folder, with links resolved, is one of `within` or in one; always if these are none."""
    try:
        real = Path(folder).resolve()
        return not within or any(real.is_relative_to(Path(root).resolve()) for root in within)
    except (OSError, ValueError, RuntimeError):  # no path at all, or links in a ring
        return False


def holds(folder: Path, name: str) -> bool:
    """Whether that is a plain file of plausible size; False for a path that is not absolute."""
    try:
        file = folder / name
        return folder.is_absolute() and file.is_file() and file.stat().st_size <= MOST_BYTES
    except (OSError, ValueError):
        return False
