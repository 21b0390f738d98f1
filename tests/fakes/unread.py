"""A command whose output nobody reads, as in `… | head`, or a pager that is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def run_unread(module: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Its exit status, and what it says of errors."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    return process.returncode, said
