"""A program that is run by a Python without what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engines.installation import explain
from tests.e2e.children import PATIENCE, ROOT


@pytest.mark.parametrize(
    ("module", "program"), [("router", "kv-router"), ("publishers", "kv-publisher"), ("engines.sim", "kv-sim")]
)
def test_it_says_what_is_missing_and_what_to_do(module: str, program: str) -> None:
    without_packages = [sys.executable, "-S", "-m", module, "--help"]
    ended = subprocess.run(without_packages, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{program}: {sys.executable} has no module ")
    assert "pip install ." in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_module_of_its_own_that_is_missing_is_a_fault() -> None:
    with pytest.raises(ModuleNotFoundError):
        explain("kv-router", ModuleNotFoundError(name="router.missing"))
