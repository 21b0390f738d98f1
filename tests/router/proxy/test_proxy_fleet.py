"""A fleet that changes while requests are under way: who gets them, and that every one of them is answered."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from indexer.types import WorkerRank
from router.events.drift import Drift
from tests.fakes.raw_client import Answered, error_of, get, post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, answer, events, held_stream, never
from tests.fakes.waiting import until
from tests.router.proxy.administering import HERE, Admin, admin_of, administering
from tests.router.proxy.test_proxy_pairs import PREFILLED, STREAMED, router_of

STREAM = b'{"prompt":"x","stream":true}'
TO_A = b"x-router-target-worker: a"


async def endless_stream(dialogue: Dialogue) -> None:
    dialogue.events_head()
    dialogue.event(b"1")
    await dialogue.gone.wait()


class Load:
    """Clients that ask again and again, each for a stream of three events."""

    def __init__(self, admin: Admin, clients: int = 4) -> None:
        self.answers: list[Answered] = []
        self._admin = admin
        self._enough = False
        self._clients = [asyncio.ensure_future(self._ask()) for _ in range(clients)]

    async def _ask(self) -> None:
        async with self._admin.router.client() as client:
            while not self._enough:
                self.answers.append(await client.ask(post(body=STREAM)))

    async def more(self, count: int = 20) -> None:
        enough = len(self.answers) + count
        await until(lambda: len(self.answers) >= enough)

    async def stop(self) -> None:
        self._enough = True
        await asyncio.gather(*self._clients)

    @property
    def workers(self) -> Counter[bytes | None]:
        """By whom all were answered, whole."""
        assert {got.status for got in self.answers} == {200}
        assert {got.body for got in self.answers} == {b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"}
        return Counter(got.header(b"x-router-worker") for got in self.answers)


@pytest.fixture
def streaming(a: ScriptedWorker, b: ScriptedWorker) -> None:
    for worker in (a, b):
        worker._default = events(b"1", b"2", b"[DONE]")


# -- joining and leaving


@pytest.mark.parametrize("mode", ["round-robin", "kv", "least-loaded"])
async def test_a_worker_joins_under_load(a: ScriptedWorker, b: ScriptedWorker, streaming: None, mode: str) -> None:
    async with administering(a, router_mode=mode) as admin:
        load = Load(admin)
        await load.more()
        status, told = await admin.add(b)
        assert (status, told["id"], told["url"], told["state"]) == (201, "b", b.url, "down")
        await admin.until_up(b)
        await until(lambda: b.requests)
        await load.stop()
        assert load.workers.keys() == {b"a", b"b"}
        assert (await admin.show("b"))[1]["state"] == "up"


@pytest.mark.parametrize("mode", ["round-robin", "kv", "least-loaded"])
async def test_a_worker_leaves_under_load(a: ScriptedWorker, b: ScriptedWorker, streaming: None, mode: str) -> None:
    async with administering(a, b, router_mode=mode) as admin:
        load = Load(admin)
        await until(lambda: a.requests and b.requests)
        assert (await admin.remove("a"))[0] == 202
        await admin.until_gone("a")
        seen = len(a.requests)
        await load.more()
        await load.stop()
        assert load.workers.keys() == {b"a", b"b"}
        assert len(a.requests) == seen
        assert (await admin.show("a"))[0] == 404
        assert [worker["id"] for worker in (await admin.ask("GET", "workers"))[1]["workers"]] == ["b"]


async def test_a_draining_worker_keeps_its_streams_and_gets_nothing_new(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(held_stream)
    async with administering(a, b) as admin, admin.router.client() as one, admin.router.client() as other:
        one.send(post("/v1/completions", STREAM, TO_A))
        await one.head()
        assert (await one.chunk())[1] == b"data: 1\n\n"
        status, told = await admin.remove("a", timeout="600")
        assert (status, told["state"], told["in_flight"], told["up"]) == (202, "draining", 1, True)
        assert 0 < told["leaves_in_seconds"] <= 600
        for _ in range(3):
            assert (await other.ask(post())).header(b"x-router-worker") == b"b"
        pinned = await other.ask(post("/v1/completions", STREAM, TO_A))
        assert pinned.status == 503
        assert "it is draining" in json.loads(pinned.body)["error"]["message"]
        ready = {each["id"]: each for each in json.loads((await other.ask(get("/ready"))).body)["workers"]}
        assert [(ready[name]["state"], ready[name]["in_flight"]) for name in "ab"] == [("draining", 1), ("up", 0)]
        assert admin.router.total("router_worker_state", worker="a", state="draining") == 1
        assert admin.router.total("router_worker_state", worker="a", state="up") == 0
        a.go_on.set()
        assert (await one.chunk())[1] == b"data: [DONE]\n\n"
        assert (await one.chunk())[1] == b""
        await admin.until_gone("a")
        assert admin.router.total("router_worker_state", worker="a") == 0
        assert admin.router.samples("router_first_byte_seconds_count").keys() == {"b"}
        assert admin.router.total("router_worker_failures_total") == 0
    assert len(a.requests) == 1


async def test_what_outlasts_the_deadline_is_cut_and_told(a: ScriptedWorker) -> None:
    a.then(endless_stream)
    async with administering(a) as admin, admin.router.client() as client:
        client.send(post(body=STREAM))
        await client.head()
        assert (await client.chunk())[1] == b"data: 1\n\n"
        assert (await admin.remove("a", timeout="600"))[0] == 202
        assert (await admin.remove("a", timeout="0"))[0] == 202, "the later word counts"
        last = (await client.chunk())[1]
        assert error_of(last)["message"] == "Worker a broke off its answer: it was removed."
        assert (await client.chunk())[1] == b""
        await admin.until_gone("a")
        await until(lambda: a.dialogues[0].is_over)
        assert (await client.ask(post())).status == 503


@pytest.mark.parametrize("begun", [True, False], ids=["in a stream", "while connecting"])
async def test_who_is_removed_is_not_blamed_for_what_is_cut(
    a: ScriptedWorker, begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    a.then(endless_stream)
    async with administering(a, breaker_failures=1) as admin, admin.router.client() as client:
        if not begun:
            await a.clog()
        client.send(post("/v1/completions", STREAM, TO_A))
        await until(lambda: admin.router.samples("router_load_requests").get("a"))
        if begun:
            await client.head()
        await admin.remove("a", timeout="0")
        await admin.until_gone("a")
    told = {record.message for record in caplog.records}
    assert "Worker failed a request" in told
    assert not told & {"Worker is down", "Worker keeps failing: it gets nothing for a while"}


@pytest.mark.parametrize("connection", ["new", "clogged", "reused"])
async def test_what_has_not_begun_at_the_deadline_goes_elsewhere(
    a: ScriptedWorker, b: ScriptedWorker, connection: str
) -> None:
    if connection == "reused":  # which would be connected anew
        a.then(answer())
    a._default = never
    async with administering(a, b) as admin, admin.router.client() as client:
        if connection == "reused":
            assert (await client.ask(post("/v1/completions", b'{"prompt":"x"}', TO_A))).status == 200
        elif connection == "clogged":
            await a.clog()
        client.send(post())
        await until(lambda: admin.router.samples("router_load_requests").get("a"))
        await admin.remove("a", timeout="0")
        got = await client.answer()
        assert (got.status, got.header(b"x-router-worker")) == (200, b"b")
        await admin.until_gone("a")
        assert admin.router.samples("router_request_seconds_count").keys() == {"b"}


async def test_what_is_cut_off_at_one_worker_after_the_other_goes_on_elsewhere(
    a: ScriptedWorker, b: ScriptedWorker
) -> None:
    """As in a fleet that is replaced: that they are removed is nothing the request has done to them."""
    a._default = b._default = never
    async with ScriptedWorker("c") as c, administering(a, b, c) as admin, admin.router.client() as client:
        client.send(post())
        for worker in (a, b):
            await until(lambda: worker.requests)  # noqa: B023 -- awaited here
            await admin.remove(worker.name, timeout="0")
            await admin.until_gone(worker.name)
        got = await client.answer()
        assert (got.status, got.header(b"x-router-worker")) == (200, b"c")


async def test_a_worker_that_comes_back_starts_anew(a: ScriptedWorker, b: ScriptedWorker) -> None:
    """By assumption, it would hold what it was sent."""
    asked = post("/v1/completions", json.dumps({"prompt": list(range(40))}).encode())
    async with administering(a, router_mode="kv") as admin, admin.router.client() as client:
        overlaps = [(await client.ask(asked)).header(b"x-router-overlap-tokens") for _ in range(2)]
        assert overlaps == [b"0", b"36"]
        audit, missing_events = admin.router.app._audit, admin.router.app._missing_events
        audit._drifts[WorkerRank("a", 0)] = Drift()
        missing_events.problems["a"] = "none arrive"
        await admin.remove("a")
        await admin.until_gone("a")
        assert audit.status(WorkerRank("a", 0)) is None, "before anybody else can have the name"
        assert not missing_events.problems
        assert (await admin.add(a))[0] == 201
        await admin.until_up(a)
        assert (await client.ask(asked)).header(b"x-router-overlap-tokens") == b"0"
        assert admin.router.total("router_requests_total", worker="a") == 1
    assert a.asked.count("/version") == 2, "it was asked what it is again"


async def test_a_router_may_begin_with_nobody(a: ScriptedWorker) -> None:
    async with administering() as admin, admin.router.client() as client:
        assert (await client.ask(post())).status == 503
        assert (await client.ask(get("/ready"))).status == 503
        assert (await admin.add(a))[0] == 201
        await admin.until_up(a)
        assert (await client.ask(post())).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_where_no_worker_is_known_a_model_is_not_said_to_be_unknown(path: str) -> None:
    body = b'{"model":"any","prompt":"x"}'
    async with administering() as admin, admin.router.client() as client:
        got = await client.ask(post(path, body))
        assert got.status == 503
        message = json.loads(got.body)["error"]["message"]
        assert "--worker http://HOST:PORT" in message
        assert "POST /admin/workers" in message


async def test_a_router_that_ends_waits_for_no_worker_that_leaves(a: ScriptedWorker) -> None:
    """`running` proves that nothing is left."""
    a.then(endless_stream)
    async with administering(a) as admin, admin.router.client() as client:
        client.send(post(body=STREAM))
        await client.head()
        await admin.remove("a", timeout="600")
        client.vanish()


# -- draining without leaving


async def test_draining_and_back(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with administering(a, b) as admin, admin.router.client() as client:

        async def answered() -> set[bytes | None]:
            return {(await client.ask(post())).header(b"x-router-worker") for _ in range(4)}

        status, told = await admin.change("a", drain=True)
        assert (status, told["state"], told["leaves_in_seconds"]) == (200, "draining", None)
        assert await answered() == {b"b"}
        assert (await admin.change("a", drain=True))[1]["state"] == "draining"
        assert (await admin.change("a", drain=False))[1]["state"] == "up"
        assert await answered() == {b"a", b"b"}


async def test_a_worker_that_leaves_may_be_called_back(a: ScriptedWorker) -> None:
    a.then(held_stream)
    async with administering(a) as admin, admin.router.client() as client, admin.router.client() as other:
        client.send(post(body=STREAM))
        await client.head()
        await admin.remove("a", timeout="600")
        status, conflict = await admin.add(a)
        assert (status, "It is leaving" in conflict["error"]["message"]) == (409, True)
        status, told = await admin.change("a", drain=False)
        assert (status, told["state"], told["leaves_in_seconds"]) == (200, "up", None)
        a.go_on.set()
        await client.read_until(b"[DONE]")
        assert (await other.ask(post())).status == 200
        assert not admin.router.app._roster._leaving  # type: ignore[union-attr]


async def test_nobody_but_draining_workers(a: ScriptedWorker) -> None:
    async with administering(a) as admin, admin.router.client() as client:
        await admin.change("a", drain=True)
        assert (await client.ask(post())).status == 503
        assert (await client.ask(post(body=b'{"model":"tiny","prompt":"x"}'))).status == 503
        assert (await client.ask(get("/ready"))).status == 503


# -- roles


async def test_a_role_changes_while_requests_are_under_way(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(held_stream)
    async with administering(a, b, options=",connector=nixl") as admin, admin.router.client() as client:
        client.send(post("/v1/completions", STREAM, TO_A))
        await client.head()
        status, told = await admin.change("a", role="decode")
        assert (status, told["role"], "no prefill worker" in told["problems"][-1]) == (200, "decode", True)
        assert told["connector"] == "nixl"
        async with admin.router.client() as other:
            assert {(await other.ask(post())).header(b"x-router-worker") for _ in range(3)} == {b"b"}
        a.go_on.set()
        await client.read_until(b"[DONE]")
        _, told = await admin.change("a", role="auto")
        assert (told["role"], told["connector"]) == ("both", "nixl")


async def test_workers_that_served_whole_are_made_to_serve_in_parts(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(PREFILLED)
    async with administering(a, b) as admin, admin.router.client() as client:
        for name, role in (("a", "prefill"), ("b", "decode")):
            status, told = await admin.change(name, role=role, connector="nixl", bootstrap_port=9, host="rack")
            assert (status, told["role"], told["connector"]) == (200, role, "nixl")
        assert (await client.ask(post(body=b'{"prompt":"x"}'))).status == 200
        assert [len(worker.requests) for worker in (a, b)] == [1, 1]
        spec = admin.router.app._fleet.workers["a"].spec
        assert (spec.bootstrap_port, spec.host) == (9, "rack")
        _, told = await admin.change("a", role="auto", connector=None, host=None)
        assert (told["role"], told["connector"]) == ("both", None)
        spec = admin.router.app._fleet.workers["a"].spec
        assert (spec.bootstrap_port, spec.host) == (9, None)


def body_of(part: str) -> Any:
    async def script(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        await (PREFILLED if part == "prefill" else answer())(dialogue)

    return script


async def pair(admin: Admin, p: ScriptedWorker) -> asyncio.Task[Answered]:
    """One request whose prefill is under way."""
    p.then(body_of("prefill"))

    async def ask() -> Answered:
        async with admin.router.client() as client:
            return await client.ask(post(body=STREAMED))

    task = asyncio.ensure_future(ask())
    await until(lambda: p.requests)
    return task


@pytest.mark.parametrize("leaver", ["p", "d"])
async def test_a_pair_goes_on_as_it_began(leaver: str) -> None:
    """Whoever drains, between the parts, and though nobody else is there."""
    async with (
        ScriptedWorker("p", default=PREFILLED) as p,
        ScriptedWorker("d", default=events(b"1", b"[DONE]")) as d,
        router_of("nixl", p, d, admin_listen=HERE) as router,
        admin_of(router) as admin,
    ):
        asked = await pair(admin, p)
        await admin.remove(leaver, timeout="600")
        p.go_on.set()
        got = await asked
        assert (got.status, got.header(b"x-router-worker"), got.header(b"x-router-prefill-worker")) == (200, b"d", b"p")
        await admin.until_gone(leaver)
        assert router.total("router_pd_leg_failures_total") == 0
        async with router.client() as client:
            assert (await client.ask(post(body=STREAMED))).status == 503


async def test_a_draining_decode_worker_gets_no_more_answers_where_there_is_another() -> None:
    async with (
        ScriptedWorker("p", default=PREFILLED) as p,
        ScriptedWorker("d") as d,
        ScriptedWorker("d2") as other,
        router_of("nixl", p, d, other, admin_listen=HERE) as router,
        admin_of(router) as admin,
    ):
        for name, left in (("d", other), ("d2", d)):
            p.requests.clear()
            p.go_on.clear()
            asked = await pair(admin, p)
            await admin.change(name, drain=True)
            p.go_on.set()
            assert (await asked).header(b"x-router-worker") == left.name.encode()
            await admin.change(name, drain=False)


async def test_who_prefilled_stays_until_its_kv_was_fetched() -> None:
    async with (
        ScriptedWorker("p", default=PREFILLED) as p,
        ScriptedWorker("d") as d,
        router_of("nixl", p, d, admin_listen=HERE) as router,
        admin_of(router) as admin,
        router.client() as client,
    ):
        d.then(body_of("decode"))
        client.send(post(body=STREAMED))
        await until(lambda: d.requests)
        await admin.remove("p", timeout="600")
        assert (await admin.show("p"))[1]["in_flight"] == 1
        d.go_on.set()
        assert (await client.answer()).status == 200
        await admin.until_gone("p")
