"""What a request asks of its worker beyond one answer to one prompt. It is placed by its first prompt alone."""

from __future__ import annotations

from typing import Final, NamedTuple


class Others(NamedTuple):
    tokens: int = 0
    """What its other prompts have beyond the first, to be computed and kept; an estimate."""
    mixed: bool = False
    """There are several answers, to its prompts or to one, and their tokens come mixed."""


ALONE: Final = Others()
