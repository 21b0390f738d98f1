"""Why there is no answer: a sentence for people, and the exit status that goes with it."""

from __future__ import annotations

from typing import ClassVar


class StoreError(Exception):
    status: ClassVar[int]


class WrongUse(StoreError):
    status = 2


class Away(StoreError):
    """Who was to be asked does not answer, or not as he should."""

    status = 1
