"""Standard output of a comparison, which may end before the comparison does."""

from __future__ import annotations

import errno
import os
from typing import Any

from rich.console import Console


class Output(Console):
    """With `kept`, whether a file is written too, what cannot be printed costs no result: the rest is not printed, and
    `check` tells why. Without, there is nothing left to do."""

    def __init__(self, kept: bool, **options: Any) -> None:
        super().__init__(**options)
        self._kept = kept
        self._lost: OSError | None = None

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            if not self._kept:
                raise
            self._lose(error)

    def on_broken_pipe(self) -> None:
        """Without this, rich ends the process."""
        if not self._kept:
            super().on_broken_pipe()
        self._lose(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))

    def check(self) -> None:
        """Raises OSError if something could not be printed."""
        if self._lost is not None:
            raise self._lost

    def _lose(self, error: OSError) -> None:
        self._lost, self.quiet = error, True
