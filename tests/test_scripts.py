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


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("demo", ["--no-server"]),
        ("demo", ["--no-serve", "--quick"]),
        ("demo", ["", "--no-serve"]),
        ("check", ["--fixed"]),
        ("check", ["--fix", "router"]),
        ("compile", ["--quick"]),
    ],
)
def test_a_script_refuses_what_it_does_not_know(checkout: Path, script: str, arguments: list[str]) -> None:
    """Before it sets anything up."""
    done = run(checkout, script, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"usage: scripts/{script}")


@pytest.mark.parametrize("script", ["demo", "check", "compile"])
def test_a_script_can_be_asked_for_help(checkout: Path, script: str) -> None:
    done = run(checkout, script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: scripts/{script}")


def run(checkout: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script as it is here, in a checkout where setting up would be seen."""
    there = shutil.copy(ROOT / "scripts" / script, checkout / "scripts")
    (checkout / "scripts" / "env.sh").write_text("exit 3")
    return subprocess.run([there, *arguments], capture_output=True, text=True, timeout=50, check=False)


def test_a_checkout_that_was_moved_is_checked(checkout: Path) -> None:
    """The scripts in its .venv/bin begin with the path of the Python that was theirs, which is there no more."""
    for tool in ("ruff", "mypy", "lint-imports"):
        write(checkout / ".venv" / "bin" / tool, "#!/nowhere/.venv/bin/python")
    write(checkout / ".venv" / "bin" / "python", """#!/bin/sh\necho "$1 $2" >&2""")
    check = shutil.copy(ROOT / "scripts" / "check", checkout / "scripts")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    done = subprocess.run([check], env=environ, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stderr.splitlines()][:3] == [
        ["-m", "ruff"],
        ["-m", "ruff"],
        ["-m", "mypy"],
    ]
    assert "lint_imports" in done.stderr


def test_ci_needs_no_home(checkout: Path) -> None:
    """A user of a container's may have none."""
    (checkout / ".ci").mkdir()
    ci = shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    for name, status in (("real-engines", 0), ("check", 0), ("audit", 0), ("test", 3)):
        write(checkout / "scripts" / name, f"#!/bin/sh\nexit {status}")
    tools = checkout / "tools"  # no later Python, and nothing to install with
    tools.mkdir()
    for name in ("bash", "dirname", "mktemp", "nice"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [ci], env={"PATH": str(tools), "TMPDIR": str(tools)}, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 3, done.stderr


def write(path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(0o755)
