"""Signals while a process is still starting: Ctrl-C ends it without a word, as after SIGINT, and SIGHUP does not. And
while a simulation runs in several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.children import PATIENCE

pytestmark = pytest.mark.slow

INTERRUPTED = 130
ROUTER = ("router", "--router-mode", "kv", "--port", "0", "--worker", "http://127.0.0.1:1")
FLEET = ("engines.sim", "--port", "0")
PUBLISHER = ("publishers", "--engine", "http://127.0.0.1:1", "--nats", "nats://127.0.0.1:1")

WHILE_IMPORTING = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
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
import os, {module}
def interrupting(*_, **__):
    os.kill(os.getpid(), {number})
    print("Went on")
{module}.warm_up = interrupting
"""
IN_A_CALLBACK = """
import ctypes, os, threading, {module}
def interrupting(*_, **__):
    ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), {number}))()
    threading.Event().wait(20)
    print("Went on")
{module}.warm_up = interrupting
"""

NAMES_HANG = """
import os, signal, socket, threading, router.serve
known = socket.getaddrinfo
def look_up(host, *rest, **more):
    if not host.endswith(".hangs"):
        return known(host, *rest, **more)
    threading.Event().wait()
socket.getaddrinfo = look_up
router.serve._leave_to_itself = lambda: os.kill(os.getpid(), signal.SIGTERM)
"""

RELOADED = """
import os, signal
from router.app import App
from router.reloading import Reloading
start = App.start
async def interrupting(self):
    os.kill(os.getpid(), signal.SIGHUP)
    await start(self)
async def reload(self):
    print("Read again")
    os.kill(os.getpid(), signal.SIGTERM)
App.start, Reloading.reload = interrupting, reload
"""

WHILE_SIMULATING = """
import os
from concurrent.futures import ProcessPoolExecutor
start = ProcessPoolExecutor.submit
def interrupting(*arguments):
    started = start(*arguments)
    os.kill(os.getpid(), {number})
    return started
ProcessPoolExecutor.submit = interrupting
"""

INTERRUPTING_ALL = """
import os, signal, sys
if "--multiprocessing-fork" in sys.orig_argv:
    try:
        os.mkdir(__file__ + ".once")
    except FileExistsError:
        pass
    else:
        os.killpg(0, signal.SIGINT)
"""


def _interrupted_importing(module: str, number: signal.Signals = signal.SIGINT) -> str:
    return WHILE_IMPORTING.format(module=module, number=int(number))


def run(prelude: str, package: str, *arguments: str) -> tuple[int, str, str]:
    """Its status, and what it says."""
    runs = f"import runpy, sys; sys.argv = {['', *arguments]}; runpy.run_module({package!r}, run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-c", f"{prelude}\n{runs}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        start_new_session=True,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("prelude", "command"),
    [
        # Those are never compiled: what is, imports each other without asking anybody.
        (_interrupted_importing("router.cli"), ROUTER),
        (_interrupted_importing("router.workers.roster"), ROUTER),
        (_interrupted_importing("publishers.publisher"), PUBLISHER),
        (_interrupted_importing("engines.sim.fleet"), FLEET),
        (_interrupted_importing("router.cli", signal.SIGHUP) + _interrupted_importing("router.workers.roster"), ROUTER),
        (ONCE_MADE.format(numbers="[signal.SIGINT]"), ROUTER),
        (ONCE_MADE.format(numbers="[signal.SIGHUP, signal.SIGINT]"), ROUTER),
    ],
    ids=[
        "imports before the router's settings",
        "router's imports",
        "publisher's imports",
        "simulated fleet's imports",
        "router's imports, after a hangup",
        "router's parts",
        "router's parts, after a hangup",
    ],
)
def test_nothing_is_said(prelude: str, command: tuple[str, ...]) -> None:
    assert run(prelude, *command) == (INTERRUPTED, "", "")


@pytest.mark.parametrize(
    ("module", "command"), [("router.cli", ROUTER), ("publishers.publisher", PUBLISHER)], ids=["router", "publisher"]
)
def test_sigterm_while_it_imports_ends_it_well(module: str, command: tuple[str, ...]) -> None:
    """As later; the first process of a container would not even be ended."""
    assert run(_interrupted_importing(module, signal.SIGTERM), *command) == (0, "", "")


def test_a_hangup_while_the_router_starts_takes_effect_when_it_has_started() -> None:
    status, told, _ = run(RELOADED, *ROUTER)
    assert [line.split()[0] for line in told.splitlines()] == ["Listening", "Read"]
    assert status == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)])
@pytest.mark.parametrize(
    ("module", "command"), [("router.app", ROUTER), ("publishers.process", PUBLISHER)], ids=["router", "publisher"]
)
@pytest.mark.parametrize("prelude", [WHILE_COMPILING, IN_A_CALLBACK], ids=["in Python", "in a callback from LLVM"])
def test_a_signal_while_it_compiles_ends_it_at_once(
    prelude: str, module: str, command: tuple[str, ...], number: signal.Signals, status: int
) -> None:
    """Half a minute is more than whoever ends it would wait."""
    assert run(prelude.format(module=module, number=int(number)), *command) == (status, "", "")


def test_names_that_are_being_looked_up_keep_a_router_neither_from_listening_nor_from_ending() -> None:
    """A name server that does not answer takes a minute or more for each."""
    workers = [part for number in range(9) for part in ("--worker", f"http://{number}.hangs:1")]
    status, told, log = run(NAMES_HANG, *ROUTER, *workers)
    assert (status, told.split()[:2]) == (0, ["Listening", "on"])
    assert "cannot be reached" in log or "did not answer" in log


LONG_STUDY = ("router", "simulate", "--workload", "huge-fleet", "--duration", "900", "--jobs", "2")
"""Each of its processes gets a run that takes minutes."""
STUDY_INTERRUPTED = (INTERRUPTED, "", "kv-router simulate: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_simulation_ends_at_once_and_says_only_that(number: signal.Signals) -> None:
    assert run(WHILE_SIMULATING.format(number=int(number)), *LONG_STUDY) == STUDY_INTERRUPTED


def test_no_process_of_a_simulation_tells_of_ctrl_c(tmp_path: Path) -> None:
    """A terminal sends it to all of them, here while one is starting."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING_ALL, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    on_the_path = f"import os; os.environ['PYTHONPATH'] = {path!r}"
    assert run(on_the_path, *LONG_STUDY) == STUDY_INTERRUPTED
