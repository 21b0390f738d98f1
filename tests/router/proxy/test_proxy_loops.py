"""Routers that lead to themselves, at once or by way of others: a request that comes back goes no further."""

from __future__ import annotations

import json
import logging

import pytest

from router.workers.worker import LOOPS
from tests.fakes.raw_client import get, post
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.waiting import until
from tests.router.proxy.administering import administering
from tests.router.proxy.running import running

VIA = b"x-router-via"


def fields(record: logging.LogRecord) -> object:
    return getattr(record, "fields", None)


async def test_a_router_that_is_its_own_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with administering() as admin, admin.router.client() as client:
        router = admin.router
        assert (await admin.ask("POST", "workers", json={"url": router.url, "name": "self"}))[0] == 201
        await until(lambda: router.samples("router_worker_up").get("self") == 1)
        for request in (post(), get("/v1/files"), post()):  # the third head is known
            got = await client.ask(request)
            assert got.status == 508
            assert "this router itself" in json.loads(got.body)["error"]["message"]
        assert router.total("router_requests_total", status="508") == 3, "none of them went round"
        warnings = [record for record in caplog.records if record.message == LOOPS]
        assert [fields(record) for record in warnings] == [{"worker": "self"}], "once"
        (worker,) = json.loads((await client.ask(get("/ready"))).body)["workers"]
        assert LOOPS in worker["problems"]
        assert (await admin.remove("self", timeout="0"))[0] == 202
        await admin.until_gone("self")


async def test_each_router_on_the_way_adds_itself_and_knows_itself_again(a: ScriptedWorker) -> None:
    async with running(a) as router:
        async with router.client() as client:
            for _ in range(2):
                assert (await client.ask(post("/v1/completions", b'{"prompt":"x"}', VIA + b": another"))).status == 200
        first, second = (request.values(VIA) for request in a.requests)
        assert first == second == [b"another", first[-1]]
        for way in (first[-1], b"a, " + first[-1], b"a\r\n" + VIA + b": " + first[-1]):
            async with router.client() as client:
                got = await client.ask(post("/v1/completions", b'{"prompt":"x"}', VIA + b": " + way))
            assert (got.status, got.header(b"x-request-id") is None) == (508, False)
    async with running(a) as other, other.client() as client:
        assert (await client.ask(post("/v1/completions", b'{"prompt":"x"}', VIA + b": " + first[-1]))).status == 200
    assert len(a.requests) == 3
