"""On what, when and of which revision something was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

from router.cli import is_compiled

from .places import ROOT


def facts() -> list[str]:
    now = datetime.datetime.now(datetime.UTC)
    return [
        f"Date: {now:%Y-%m-%d %H:%M} UTC, revision {_revision()}",
        (
            f"Machine: {_processor()}, {os.cpu_count()} cores, {_memory()} GiB, Linux, "
            f"Python {platform.python_version()} ({Path(sys.executable).resolve()})"
        ),
        f"Ours: {'compiled, as it is once installed' if is_compiled() else 'not compiled'}",
    ]


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
