"""An answer of the Responses API that an engine keeps is gone on with, shown and cancelled where it is."""

from __future__ import annotations

import json

import pytest

import router.openai.kept_responses
from router.workers.spec import parse_worker
from tests.fakes.raw_client import Answered, RawClient, get, post
from tests.fakes.scripted_worker import ScriptedWorker, answer, events, never
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running

PATH = "/v1/responses"
MISSING = answer(b'{"error":{"code":404}}', 404)
EVENT = b'{"response":{"id":"resp_s","created_at":1,"status":"in_progress"},"type":"response.created"}'


def kept(name: str = "resp_1") -> bytes:
    return json.dumps({"id": name, "object": "response", "output": [{"id": "msg_1"}]}).encode()


async def create(client: RawClient, **fields: object) -> Answered:
    return await client.ask(post(PATH, json.dumps({"model": "tiny", "input": "Go on.", **fields}).encode()))


async def places(client: RawClient, requests: list[bytes]) -> list[bytes | None]:
    return [(await client.ask(request)).header(b"x-router-worker") for request in requests]


def about(name: str, times: int = 2) -> list[bytes]:
    """All that can be done with one, each several times."""
    body = json.dumps({"model": "tiny", "input": "Go on.", "previous_response_id": name}).encode()
    return [post(PATH, body), get(f"{PATH}/{name}"), post(f"{PATH}/{name}/cancel", b"")] * times


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
async def test_what_is_about_an_answer_goes_where_it_was_given(a: ScriptedWorker, b: ScriptedWorker, mode: str) -> None:
    a.then(answer(kept("resp_a")))
    b.then(answer(kept("resp_b")))
    async with running(a, b, router_mode=mode) as router, router.client() as client:
        keepers = {}
        for _ in range(2):
            first = await create(client)
            keepers[json.loads(first.body)["id"]] = first.header(b"x-router-worker")
        assert keepers == {"resp_a": b"a", "resp_b": b"b"}
        assert set(await places(client, about("resp_a"))) == {b"a"}
        assert set(await places(client, about("resp_b"))) == {b"b"}
        assert (len(a.requests), len(b.requests)) == (7, 7), "nobody was asked who keeps them"


async def test_the_answer_may_be_a_stream(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(events(EVENT, b'{"response":{"id":"resp_s"},"type":"response.completed"}'))
    async with running(a, b) as router, router.client() as client:
        assert (await create(client, stream=True)).header(b"x-router-worker") == b"a"
        assert set(await places(client, about("resp_s"))) == {b"a"}
        assert (len(a.requests), len(b.requests)) == (7, 0)


async def test_who_keeps_what_another_router_passed_on_is_asked_for_once() -> None:
    here = answer(kept("resp_2"))  # of another name, by which nothing is learned of the one that is asked for
    async with ScriptedWorker("a", default=MISSING) as a, ScriptedWorker("b", default=here) as b:
        async with running(a, b) as router, router.client() as client:
            assert set(await places(client, about("resp_1"))) == {b"b"}
        assert [each.target for each in a.requests] == [b"/v1/responses/resp_1"]
        assert len(b.requests) == 1 + 6


async def test_a_worker_that_does_not_say_is_not_waited_for(a: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    a.then(never)
    monkeypatch.setattr(router.openai.kept_responses, "PATIENCE", 0.05)
    async with ScriptedWorker("b", default=MISSING) as b, running(a, b) as front, front.client() as client:
        assert (await client.ask(get(f"{PATH}/resp_1"))).status in {200, 404}
        assert a.dialogues[0].is_over


async def test_for_a_client_that_has_gone_meanwhile_nobody_is_asked(
    a: ScriptedWorker, b: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker in (a, b):
        worker.then(never)
    monkeypatch.setattr(router.openai.kept_responses, "_ASKING", 1)
    monkeypatch.setattr(router.openai.kept_responses, "PATIENCE", 0.2)
    async with running(a, b) as front, front.client() as one, front.client() as two, front.client() as three:
        under_way = front.app._draining.exchanges
        one.send(get(f"{PATH}/resp_1"))
        await until(lambda: a.requests and b.requests)
        two.send(get(f"{PATH}/resp_2"))
        await until(lambda: len(under_way) == 2)
        two.vanish()
        await until(lambda: len(under_way) == 1)
        assert (await three.ask(get(f"{PATH}/resp_3"))).status == 200
    assert b"/v1/responses/resp_2" not in {request.target for request in (*a.requests, *b.requests)}


async def test_what_nobody_keeps_is_for_an_engine_to_say(a: ScriptedWorker, b: ScriptedWorker) -> None:
    for worker in (a, b):
        worker.then(MISSING, MISSING)
    async with running(a, b) as router, router.client() as client:
        got = await create(client, previous_response_id="resp_1")
        assert (got.status, got.body) == (404, b'{"error":{"code":404}}')


@pytest.mark.parametrize("name", [".", ".."])
async def test_no_other_path_is_asked_for_by_a_name(a: ScriptedWorker, b: ScriptedWorker, name: str) -> None:
    async with running(a, b) as router, router.client() as client:
        await create(client, previous_response_id=name)
    assert [request.target for request in (*a.requests, *b.requests)] == [PATH.encode()]


async def test_nobody_else_is_tried_while_its_keeper_is_down(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(answer(kept()))
    async with running(a, b, health_interval=0.2) as router, router.client() as client:
        await create(client)
        await a.refuse()
        statuses = {(await client.ask(request)).status for request in about("resp_1")}
        assert statuses <= {502, 503}
        assert not b.requests


async def test_whoever_has_its_keepers_name_now_is_not_asked_for_it(a: ScriptedWorker) -> None:
    a.then(answer(kept()))
    async with ScriptedWorker("b", default=MISSING) as b, running(a) as router, router.client() as client:
        await create(client)
        assert router.app._roster
        fleet = router.app._context.fleet
        router.app._roster.take([parse_worker(f"{b.url},name=a"), parse_worker(f"{a.url},name=c")], timeout=10)
        await until(lambda: {worker.spec.url for worker in fleet.up} == {a.url, b.url})
        assert set(await places(client, about("resp_1"))) == {b"c"}


@pytest.mark.parametrize(
    "fields", [{"previous_response_id": named} for named in (5, None, "", "a/b", "a b", "x" * 129)] + [{"store": "?"}]
)
async def test_what_names_none_goes_anywhere(a: ScriptedWorker, b: ScriptedWorker, fields: dict[str, object]) -> None:
    async with running(a, b) as router, router.client() as client:
        got = [(await create(client, **fields)).header(b"x-router-worker") for _ in range(4)]
        assert got == [b"a", b"b"] * 2


async def test_what_is_not_to_be_kept_is_not_noted(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(answer(kept()))
    async with running(a, b) as router, router.client() as client:
        await create(client, store=False)
        assert not _known(router)
        await create(client)  # by b, without an id
        a.then(answer(kept(), 400))
        await create(client)
        assert not _known(router)


async def test_who_names_a_worker_gets_it(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(answer(kept()))
    async with running(a, b) as router, router.client() as client:
        await create(client)
        named = get(f"{PATH}/resp_1", b"x-router-target-worker: b")
        assert await places(client, [named]) == [b"b"]


async def test_the_oldest_are_forgotten(a: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.openai.kept_responses, "REMEMBERED", 2)
    a.then(*(answer(kept(f"resp_{number}")) for number in (1, 2, 1, 3)))
    async with running(a) as front, front.client() as client:
        for _ in range(4):
            await create(client)
        assert _known(front) == ["resp_1", "resp_3"]


def _known(router: RunningRouter) -> list[str]:
    return list(router.app._responses._keepers)
