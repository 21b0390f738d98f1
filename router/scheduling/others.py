"""What a request with several prompts or answers asks of its worker beyond one answer to its first prompt, by which
alone the worker is chosen."""

from __future__ import annotations

from typing import Final, NamedTuple


class Others(NamedTuple):
    sequences: int = 0
    """Answers beyond the first, to the same prompt (`n`) or to others: the engine runs each as a request. In a stream
    their tokens come mixed with those of the first."""
    tokens: int = 0
    """Tokens of the other prompts that must be computed and kept beyond what they share with the first; an estimate."""


ALONE: Final = Others()
