"""What a request asks of its worker beyond one answer to one prompt. It is placed by its first prompt alone."""

from __future__ import annotations

from typing import Final, NamedTuple


class Others(NamedTuple):
    sequences: int = 0
    """Answers beyond the first, to its prompts or to one: the engine runs each as a request. Their tokens come mixed
    with those of the first."""
    tokens: int = 0
    """What its other prompts have beyond the first, to be computed and kept; an estimate."""


ALONE: Final = Others()
