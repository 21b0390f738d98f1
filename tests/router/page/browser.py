"""A page in a real browser, without a display."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, _NAMES) if path), None)
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr")


def browse(page: Path, *flags: str) -> tuple[str, list[str]]:
    """The document after everything has been drawn, and what was said on the console."""
    assert CHROMIUM
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [CHROMIUM, *_FLAGS, profile, *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    sys.stderr.write(done.stderr)
    assert done.returncode == 0
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
