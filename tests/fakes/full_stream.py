"""A stream to a disk without room."""

from __future__ import annotations

import errno
import io
import os


class FullStream(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
