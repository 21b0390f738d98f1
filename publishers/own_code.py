"""Further processes that run code of this program."""

from __future__ import annotations

import sys


def python_command(code: str) -> list[str]:
    """Of a process that runs `code` and imports what this process would, from the folders that it would: without them,
    Python looks into the working folder first, whatever lies there."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = sys.argv[1:]; {code}", *sys.path]
