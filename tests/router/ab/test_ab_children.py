from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from router.ab.children import Child, _child, _running
from router.ab.errors import RunError

SLEEPS = "import signal, sys; print('a reason', file=sys.stderr, flush=True); print('up', flush=True); signal.pause()"


async def die(child: Child) -> None:
    async with _running(child):
        os.kill(child.process.pid, signal.SIGKILL)
        await asyncio.Event().wait()  # for answers, for hours


async def go_wrong(child: Child) -> None:
    async with _running(child):
        raise RunError("something else")


@pytest.mark.parametrize(
    ("run", "told"),
    [(die, "the router ended with status -9 during the run; it said: a reason"), (go_wrong, "something else")],
)
async def test_a_run_does_not_outlive_its_router(run: Callable[[Child], Awaitable[None]], told: str) -> None:
    async with _child("the router", ["-c", SLEEPS]) as child:
        assert await child.line() == "up\n"
        with pytest.raises(RunError, match=f"^{told}$"):
            await run(child)


async def test_a_run_that_is_over_ends_its_router() -> None:
    async with _child("the router", ["-c", SLEEPS]) as child:
        assert await child.line() == "up\n"
        async with _running(child):
            pass
    assert child.process.returncode == -signal.SIGTERM


async def test_variables_that_are_settings_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_KV_POLICY", "overlap")
    monkeypatch.setenv("OTHER", "kept")
    tell = "import os; print([name for name in ('ROUTER_KV_POLICY', 'OTHER') if name in os.environ])"
    async with _child("the router", ["-c", tell]) as child:
        assert await child.line() == "['OTHER']\n"
