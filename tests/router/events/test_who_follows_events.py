"""Whether engines' KV events are read depends on whether anything is routed by prefix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.waiting import until
from tests.fakes.zmq_engine import FakeEngine
from tests.router.proxy.running import running


@pytest.mark.parametrize(
    ("settings", "followed"),
    [
        ({"router_mode": "kv"}, True),
        ({"router_mode": "kv", "kv_events": False}, False),
        ({"router_mode": "round-robin"}, False),
        ({"router_mode": "round-robin", "ab": "kv:1,round-robin:1"}, True),
    ],
)
async def test_events_are_read_where_a_policy_looks_at_prefixes(settings: dict[str, Any], followed: bool) -> None:
    """Whether they are or not, the engine's load is."""
    async with FakeEngine() as engine, ScriptedWorker("a") as a:
        options = f",events={engine.source.endpoint}"
        async with running(a, options=options, load_interval=0.01, **settings) as router:
            publisher = router.app._roster._resources._followed["a"].publisher  # type: ignore[union-attr]
            await until(lambda: router.samples("router_load_age_seconds"))
            assert bool(publisher.sources) == followed
            assert router.app._indexer.watches(publisher.ranks[0].relay.rank) == followed
