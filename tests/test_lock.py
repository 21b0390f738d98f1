"""Every locked dependency is named with its version and its hashes, and installed by them."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def test_every_dependency_is_locked_with_hashes() -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / "requirements.lock").read_text("utf-8"))[1:]
    assert len(entries) > 50
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==[^ ]+ ", entry), entry[:60]
        assert "--hash=sha256:" in entry, entry[:60]


def test_every_python_gets_the_same_versions() -> None:
    """Of numpy, 3.12 and later once got one whose types mypy cannot read for 3.11."""
    lines = re.findall(r"^[A-Za-z0-9][^\\\n]+", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE)
    locked = [Requirement(line) for line in lines]
    assert any(each.name == "numpy" for each in locked)

    def chosen(python: str) -> set[str]:
        environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
        return {
            f"{each.name}{each.specifier}"
            for each in locked
            if each.marker is None or each.marker.evaluate(environment)
        }

    usual = {name.partition("=")[0]: name for name in chosen("3.11")}
    for python in ("3.12", "3.13", "3.14"):
        others = {name for name in chosen(python) if usual.get(name.partition("=")[0], name) != name}
        assert not others


def test_nothing_is_installed_but_by_its_hash() -> None:
    """The tools that only make the lock and audit it are not among what runs."""
    script = (ROOT / "scripts" / "env.sh").read_text("utf-8")
    installs = [line for line in script.splitlines() if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line and "--no-deps" in line for line in installs)
