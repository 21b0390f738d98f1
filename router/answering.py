"""Which engines are asked for tokens: each request waits for its answer, so an engine that gives none is left alone."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from publishers.logs import log_event

logger = logging.getLogger("router.answering")

MOST_UNANSWERED = 2
"""Questions in a row without an answer after which an engine rests: one alone may have been of a very long prompt."""
REST = 10.0
"""Seconds between two questions to an engine that does not answer."""
_NOBODY: frozenset[str] = frozenset()


class Answering:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unanswered: Counter[str] = Counter()
        self._again: dict[str, float] = {}
        """When each worker that does not answer may be asked again."""

    def resting(self) -> frozenset[str]:
        """Workers that are not to be asked now."""
        if not self._again:
            return _NOBODY
        now = self._clock()
        return frozenset(worker for worker, when in self._again.items() if when > now)

    def asked(self, worker: str) -> None:
        """Of one that has rested a single question finds out whether it answers."""
        if worker in self._again:
            self._again[worker] = self._clock() + REST

    def silent(self, worker: str) -> None:
        """A question was not answered in time, or could not be asked."""
        self._unanswered[worker] += 1
        if self._unanswered[worker] < MOST_UNANSWERED:
            return
        if worker not in self._again:
            text = f"An engine does not answer /tokenize in time: it is asked once in {REST:g} s until it does"
            log_event(logger, logging.WARNING, text, worker=worker)
        self._again[worker] = self._clock() + REST

    def forget(self, worker: str) -> None:
        """It has answered, or has left."""
        del self._unanswered[worker]  # a Counter takes it that there is none
        self._again.pop(worker, None)
