"""Engines' versions, as far as it matters what is older than what."""

from __future__ import annotations

import re

Version = tuple[int, int, int]

_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", re.ASCII)


def is_before(version: str | None, first: Version) -> bool:
    """Whether a release is older than `first`; False where nobody can tell, as with builds that call themselves 0.0."""
    match = _VERSION.match(version or "")
    numbers = tuple(map(int, match.groups())) if match else first
    return (0, 1) <= numbers < first
