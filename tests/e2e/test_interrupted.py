"""Signals while a process is still starting: Ctrl-C ends it without a word, as after SIGINT, and SIGHUP does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.children import PATIENCE

pytestmark = pytest.mark.slow

INTERRUPTED = 130
ROUTER = ("router", "--router-mode", "kv", "--port", "0", "--worker", "http://127.0.0.1:1")
PUBLISHER = ("publishers", "--engine", "http://127.0.0.1:1", "--nats", "nats://127.0.0.1:1")

WHILE_IMPORTING = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""
ONCE_MADE = """
import os, signal
from router.app import App
make = App.__init__
def interrupting(self, *args):
    make(self, *args)
    for number in {numbers}:
        os.kill(os.getpid(), number)
App.__init__ = interrupting
"""
WHILE_COMPILING = """
import os, signal
import router.warm_up
def interrupting(*_):
    os.kill(os.getpid(), {number})
    print("Compiled")
router.warm_up.warm_up = interrupting
"""

RELOADED = """
import os, signal
from router.app import App
from router.reloading import Reloading
start = App.start
async def interrupting(self):
    os.kill(os.getpid(), signal.SIGHUP)
    await start(self)
def reload(self):
    print("Read again")
    os.kill(os.getpid(), signal.SIGTERM)
App.start, Reloading.reload = interrupting, reload
"""


def run(prelude: str, package: str, *arguments: str) -> tuple[int, str, str]:
    """Its status, and what it says."""
    runs = f"import runpy, sys; sys.argv = {['', *arguments]}; runpy.run_module({package!r}, run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-c", f"{prelude}\n{runs}"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("prelude", "command"),
    [
        # Those are never compiled: what is, imports each other without asking anybody.
        (WHILE_IMPORTING.format(module="router.cli"), ROUTER),
        (WHILE_IMPORTING.format(module="router.workers.roster"), ROUTER),
        (WHILE_IMPORTING.format(module="publishers.publisher"), PUBLISHER),
        (ONCE_MADE.format(numbers="[signal.SIGINT]"), ROUTER),
        (ONCE_MADE.format(numbers="[signal.SIGHUP, signal.SIGINT]"), ROUTER),
        (WHILE_COMPILING.format(number="signal.SIGINT"), ROUTER),
    ],
    ids=[
        "imports before the router's settings",
        "router's imports",
        "publisher's imports",
        "router's parts",
        "router's parts, after a hangup",
        "what the router compiles",
    ],
)
def test_nothing_is_said(prelude: str, command: tuple[str, ...]) -> None:
    assert run(prelude, *command) == (INTERRUPTED, "", "")


def test_a_router_that_is_to_end_does_not_compile_first() -> None:
    assert run(WHILE_COMPILING.format(number="signal.SIGTERM"), *ROUTER) == (0, "", "")


def test_a_hangup_while_the_router_starts_takes_effect_when_it_has_started() -> None:
    status, told, _ = run(RELOADED, *ROUTER)
    assert [line.split()[0] for line in told.splitlines()] == ["Listening", "Read"]
    assert status == 0
