"""Every locked dependency is named with its version and its hashes, and installed by them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_dependency_is_locked_with_hashes() -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / "requirements.lock").read_text("utf-8"))[1:]
    assert len(entries) > 50
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==[^ ]+ ", entry), entry[:60]
        assert "--hash=sha256:" in entry, entry[:60]


def test_nothing_is_installed_but_by_its_hash() -> None:
    """The tools that only make the lock and audit it are not among what runs."""
    script = (ROOT / "scripts" / "env.sh").read_text("utf-8")
    installs = [line for line in script.splitlines() if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line and "--no-deps" in line for line in installs)
