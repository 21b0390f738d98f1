"""The scripts find the checkout, whatever the caller's shell is set to, and refuse what they do not know."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Set up already, with blanks in its name; beside it is another folder of scripts."""
    made, elsewhere = tmp_path / "a check out", tmp_path / "elsewhere"
    for folder in (made / "scripts", made / ".venv" / "bin", elsewhere / "scripts"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "env.sh", made / "scripts")
    for lock in (made / "requirements.lock", made / ".venv" / ".lock-installed"):
        lock.write_text("")
    (made / "scripts" / "where").write_text('source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"; printf %s "$root:$PWD"')
    return made


def test_a_script_goes_to_its_own_checkout_whatever_the_search_path_of_cd(checkout: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    environ["CDPATH"] = str(checkout.parent / "elsewhere")
    command = ["bash", "-eu", "scripts/where"]
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == f"{checkout}:{checkout}"


@pytest.mark.parametrize("arguments", [["--no-server"], ["--no-serve", "--quick"], ["", "--no-serve"]])
def test_the_demo_refuses_what_it_does_not_know(checkout: Path, arguments: list[str]) -> None:
    """Before it sets anything up."""
    demo = shutil.copy(ROOT / "scripts" / "demo", checkout / "scripts")
    (checkout / "scripts" / "env.sh").write_text("exit 0")
    done = subprocess.run([demo, *arguments], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
