"""What is over is gone at once: with nothing left to the garbage collector, memory stays flat and nothing stands still
while it looks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import cast

import pytest

from router.http.front import Connection
from router.proxy.exchange import Exchange
from router.routing import RequestRouting
from tests.fakes.raw_client import post
from tests.fakes.scripted_worker import Script, ScriptedWorker, answer, drop, events, never
from tests.fakes.waiting import until
from tests.router.proxy.running import running

STREAMED = b'{"prompt":[1,2,3,4,5,6,7,8],"stream":true}'


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def here() -> list[object]:
    return [each for each in gc.get_objects() if isinstance(each, (Connection, Exchange))]


ANSWERS = {"whole": answer(), "streamed": events(b"1", b"[DONE]"), "broken": drop, "refused": answer(b"{}", 400)}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("script", ANSWERS.values(), ids=ANSWERS.keys())
async def test_a_client_that_was_answered(script: Script) -> None:
    async with ScriptedWorker("a", default=script) as a, running(a, router_mode="kv") as router:
        async with router.client() as client:
            await client.ask(post(body=STREAMED))
        await until(lambda: not here())


async def test_a_request_under_way_keeps_nothing_for_each_worker_that_it_could_have_gone_to() -> None:
    """A thousand workers of two ranks took 300 kB for each request."""
    async with (
        ScriptedWorker("a", default=never) as a,
        running(a, router_mode="kv") as router,
        router.client() as client,
    ):
        client.send(post(body=STREAMED))
        await until(lambda: a.requests)
        (exchange,) = router.app._draining.exchanges
        assert exchange._leg
        decision = exchange._leg.decision
        assert decision.overlap_tokens is not None, "it was looked up"
        assert (decision.costs, decision._predict) == ({}, None)
        assert cast("RequestRouting", exchange._routing)._found is None
        client.vanish()


@pytest.mark.usefixtures("uncollected")
async def test_a_client_that_leaves() -> None:
    async with ScriptedWorker("a", default=never) as a, running(a, router_mode="kv") as router:
        async with router.client() as client:
            client.send(post(body=STREAMED))
            await until(lambda: a.requests)
            assert here()
            client.vanish()
        await until(lambda: not here())
