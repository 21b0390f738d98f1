"""Streams that break off at one worker and go on from another; the engines behind them are `migration.engine`."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest

from router import housekeeping
from router.tokens import Endpoint
from tests.fakes.raw_client import Answered, RawClient, get, post
from tests.fakes.scripted_worker import Dialogue, Script, ScriptedWorker, answer, held_stream, never
from tests.fakes.waiting import until
from tests.router.migration.client import Seen, seen
from tests.router.migration.engine import Engine, text_of
from tests.router.proxy.running import RunningRouter, running

PROMPT = [0, 1, 2]
ANSWER = [0, 1, 6, 7, 3, 11, 12, 13, 14, 4, 8, 9, 10, 5]
TEXT = text_of(ANSWER)
PATHS: dict[str, Endpoint] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
EVENTS = {"completions": len(ANSWER) + 2, "chat": len(ANSWER) + 3}
"""Of a whole stream: each token's, the usage, the end, and of a chat the role."""
SIZE = 48 * 2**20
"""Bytes beyond what sockets hold."""
Way = Callable[[Dialogue], None]


def asking(endpoint: Endpoint, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "stream": True, "max_tokens": len(ANSWER), "stream_options": {"include_usage": True}}
    asked = {"prompt": PROMPT} if endpoint == "completions" else {"messages": [{"role": "user", "content": "?"}]}
    return {**body, **asked, **more}


def path_of(endpoint: Endpoint) -> str:
    return next(path for path, name in PATHS.items() if name == endpoint)


def engine(name: str, after: int | None = None, way: Way = Dialogue.drop) -> Script:
    """Whole, or `way` after so many events, which the client has by then."""

    async def script(dialogue: Dialogue) -> None:
        endpoint = PATHS.get(dialogue.request.target.decode())
        if endpoint is None:  # a page that a vLLM does not have
            await answer(status=404)(dialogue)
            return
        events = list(Engine(PROMPT, ANSWER, [1], name).stream(endpoint, json.loads(dialogue.request.body)))
        dialogue.events_head()
        for event in events[:after]:
            dialogue.chunk(event)
        if after is None:
            dialogue.end()
        else:
            if after:
                await dialogue.go_on.wait()
            way(dialogue)

    return script


@asynccontextmanager
async def fleet(
    *scripts: Script, unknown: Collection[int] = (), contexts: Collection[int] = (), **settings: Any
) -> AsyncIterator[tuple[RunningRouter, RawClient, list[ScriptedWorker]]]:
    """A worker for each; they are asked in this order. `unknown`: of these nobody can tell what engine they are.
    `contexts`: how long each one's is."""
    workers = [ScriptedWorker(f"w{number}", default=script) for number, script in enumerate(scripts)]
    for worker, length in zip(workers, contexts, strict=False):
        worker.pages.max_model_len = length
    for number in unknown:
        workers[number].pages.statuses |= dict.fromkeys(
            ("/version", "/v1/models", "/metrics", "/kv_event_sources"), 404
        )
    for worker in workers:
        await worker.listen()
    try:
        async with running(*workers, **{"migration_limit": 1, **settings}) as router, router.client() as client:
            yield router, client, workers
    finally:
        for worker in workers:
            await worker.__aexit__()


async def ask(
    client: RawClient, workers: list[ScriptedWorker], endpoint: Endpoint, **more: Any
) -> tuple[Answered, Seen]:
    client.send(post(path_of(endpoint), json.dumps(asking(endpoint, **more)).encode()))
    head = await client.head()
    assert head.status == 200
    body, content = b"", b"something"
    while content:
        _, content = await client.chunk()
        body += content
        for worker in workers:
            worker.go_on.set()
    return head, seen(body)


def assert_whole(found: Seen, endpoint: Endpoint) -> None:
    assert (found.text, found.errors, found.ends, found.reasons) == (TEXT, [], 1, ["length"])
    assert (found.roles, len(found.names)) == (endpoint == "chat", 1)
    assert found.usage == {"prompt_tokens": 3, "completion_tokens": len(ANSWER), "total_tokens": 3 + len(ANSWER)}
    assert (found.prompt, found.tokens) == (None, [])


def migrations(router: RunningRouter) -> dict[str, float]:
    outcomes = ("continued", "ended", "refused", "failed")
    counts = {outcome: router.total("router_migrations_total", outcome=outcome) for outcome in outcomes}
    return {outcome: count for outcome, count in counts.items() if count}


def says_that_it_died(dialogue: Dialogue) -> None:
    """As vLLM does when its engine process is gone."""
    dialogue.event(b'{"error": {"message": "EngineCore encountered an issue.", "param": null, "code": 500}}')
    dialogue.event(b"[DONE]")
    dialogue.end()


@pytest.mark.parametrize("way", [Dialogue.drop, Dialogue.reset, Dialogue.end, says_that_it_died])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_stream_that_breaks_after_any_event(endpoint: Endpoint, way: Way) -> None:
    for after in range(1, EVENTS[endpoint]):
        async with fleet(engine("a", after, way), engine("b")) as (router, client, workers):
            _, found = await ask(client, workers, endpoint)
            assert_whole(found, endpoint)
            assert router.samples("router_worker_failures_total") == {"w0": 1}
            if way is not Dialogue.reset:  # which may overtake what was sent
                ended = after >= EVENTS[endpoint] - 2
                assert len(workers[1].requests) == (not ended)
                assert (await ask(client, workers, endpoint))[1].ends == 1  # the client's connection goes on


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_tokens_that_come_in_one_piece_with_the_failure_are_not_lost(endpoint: Endpoint) -> None:
    async def script(dialogue: Dialogue) -> None:
        first, *events = Engine(PROMPT, ANSWER, [1], "a").stream(endpoint, json.loads(dialogue.request.body))
        dialogue.events_head()
        dialogue.chunk(first)
        await dialogue.go_on.wait()
        died = b'data: {"error": {"message": "EngineCore encountered an issue.", "param": null, "code": 500}}\n\n'
        dialogue.chunk(b"".join(events[:4]) + died)

    async with fleet(script, engine("b")) as (router, client, workers):
        _, found = await ask(client, workers, endpoint)
        assert_whole(found, endpoint)
        assert migrations(router) == {"continued": 1}


async def test_what_the_next_worker_is_asked() -> None:
    async with fleet(engine("a", 4), engine("b")) as (router, client, workers):
        first, second = workers
        got, found = await ask(client, workers, "chat", temperature=0.5, user="u")
        assert_whole(found, "chat")
        assert got.header(b"x-router-worker") == b"w0"
        assert found.names == {("a", "chat.completion.chunk", 1, "m")}
        assert migrations(router) == {"continued": 1}
        assert router.samples("router_retries_total") == {"w0": 1}
        assert router.total("router_requests_total", end="complete", worker="w1") == 1
    (asked,), (next_asked,) = first.requests, second.requests
    assert json.loads(asked.body) == {**asking("chat", temperature=0.5, user="u"), "return_token_ids": True}
    assert next_asked.target == b"/v1/completions"
    wanted = asking("completions", temperature=0.5, user="u", return_token_ids=True)
    assert json.loads(next_asked.body) == {**wanted, "prompt": PROMPT + ANSWER[:2], "max_tokens": len(ANSWER) - 2}
    assert asked.values(b"x-request-id") == next_asked.values(b"x-request-id") == [got.header(b"x-request-id")]


def compressing(events: Script) -> Script:
    """An engine behind a proxy that compresses where that is accepted."""

    async def script(dialogue: Dialogue) -> None:
        if dialogue.request.values(b"accept-encoding") == [b"gzip"]:
            dialogue.head(200, b"content-type: text/event-stream", b"content-encoding: gzip")
            dialogue.chunk(gzip.compress(b"data: [DONE]\n\n"))
            dialogue.end()
        else:
            await events(dialogue)

    return script


async def test_a_stream_that_is_to_be_understood_is_not_compressed() -> None:
    async with fleet(compressing(engine("a", 4)), compressing(engine("b"))) as (router, client, workers):
        client.send(post(path_of("chat"), json.dumps(asking("chat")).encode(), b"accept-encoding: gzip"))
        head = await client.head()
        workers[0].go_on.set()
        body = b"".join([content async for content in contents(client)])
        assert head.header(b"content-encoding") is None
        assert_whole(seen(body), "chat")
        assert migrations(router) == {"continued": 1}


async def contents(client: RawClient) -> AsyncIterator[bytes]:
    """Of the chunks that are left."""
    while content := (await client.chunk())[1]:
        yield content


async def test_a_chat_without_a_maximum_may_become_as_long_as_its_model_allows() -> None:
    async with fleet(engine("a", 4), engine("b")) as (_, client, workers):
        assert_whole((await ask(client, workers, "chat", max_tokens=None))[1], "chat")
        assert json.loads(workers[1].requests[0].body)["max_tokens"] == 4096 - len(PROMPT) - 2


@pytest.mark.parametrize(("most", "asked"), [(None, 59), (len(ANSWER), len(ANSWER) - 2)])
async def test_who_goes_on_has_room_for_the_rest(most: int | None, asked: int) -> None:
    """And without a maximum as much as its own context leaves."""
    scripts, contexts = [engine("a", 4), engine("b"), engine("c")], [32, 5 if most is None else 16, 64]
    async with fleet(*scripts, contexts=contexts) as (router, client, workers):
        assert_whole((await ask(client, workers, "chat", max_tokens=most))[1], "chat")
        assert [len(worker.requests) for worker in workers] == [1, 0, 1]
        assert json.loads(workers[2].requests[0].body)["max_tokens"] == asked
        assert migrations(router) == {"continued": 1}


async def test_an_engine_of_another_kind_takes_no_stream_over() -> None:
    async with fleet(engine("a", 4), engine("b"), engine("c"), unknown=(1,)) as (_, client, workers):
        assert_whole((await ask(client, workers, "chat"))[1], "chat")
        asked = [[asked.target for asked in worker.requests if asked.target.decode() in PATHS] for worker in workers]
        assert asked == [[b"/v1/chat/completions"], [], [b"/v1/completions"]]
        got = [(await ask(client, workers, "completions"))[0].header(b"x-router-worker") for _ in range(3)]
        assert b"w1" in got
        plain = [json.loads(request.body) for request in workers[1].requests if request.target == b"/v1/completions"]
        assert plain
        assert not any("return_token_ids" in body for body in plain)


async def test_tokens_go_to_who_asks_for_them() -> None:
    async with fleet(engine("a", 7), engine("b")) as (_, client, workers):
        _, found = await ask(client, workers, "completions", return_token_ids=True)
        assert (found.text, found.tokens, found.prompt) == (TEXT, ANSWER, PROMPT)


async def test_one_stream_may_go_on_twice() -> None:
    scripts = [engine("a", 3), engine("b", 4), engine("c")]
    async with fleet(*scripts, migration_limit=2) as (router, client, workers):
        assert_whole((await ask(client, workers, "chat"))[1], "chat")
        assert migrations(router) == {"continued": 2}
        assert [len(worker.requests) for worker in workers] == [1, 1, 1]


async def test_a_stream_may_go_on_where_it_broke_off_before() -> None:
    """As when workers are started anew one after the other: the first is well again when the second is ended."""
    ways = iter([engine("a", 3), engine("c")])

    async def first(dialogue: Dialogue) -> None:
        asked = dialogue.request.target.decode() in PATHS
        await (next(ways) if asked else engine("a"))(dialogue)

    async with fleet(first, engine("b", 4), migration_limit=2) as (router, client, workers):
        assert_whole((await ask(client, workers, "chat"))[1], "chat")
        assert migrations(router) == {"continued": 2}
        assert [len(worker.requests) for worker in workers] == [2, 1]


async def test_but_not_where_it_broke_off_just_now() -> None:
    scripts = [engine("a", 3), engine("b", 0)]  # the second is given up before its first token
    async with fleet(*scripts, migration_limit=3) as (router, client, workers):
        assert len((await ask(client, workers, "chat"))[1].errors) == 1
        assert migrations(router) == {"failed": 1}
        assert [len(worker.requests) for worker in workers] == [1, 1]


async def test_a_worker_that_says_that_the_rest_cannot_be_asked_for_is_not_to_blame() -> None:
    """Another would say the same."""
    scripts = [engine("a", 3), answer(b"{}", 400), engine("c")]
    async with fleet(*scripts, migration_limit=2) as (router, client, workers):
        (error,) = (await ask(client, workers, "completions"))[1].errors
        assert error["message"] == "The worker broke off its answer, and no other could go on."
        assert router.samples("router_worker_failures_total") == {"w0": 1}
        assert migrations(router) == {"failed": 1}
        assert [len(worker.requests) for worker in workers] == [1, 1, 0]


async def test_no_more_often_than_the_limit() -> None:
    async with fleet(engine("a", 3), engine("b", 4), engine("c")) as (router, client, workers):
        _, found = await ask(client, workers, "completions")
        (error,) = found.errors
        assert "Worker w1 broke off its answer" in error["message"]
        assert (TEXT.startswith(found.text), len(found.text) > 2, found.ends) == (True, True, 0)
        assert migrations(router) == {"continued": 1, "failed": 1}
        assert len(workers[2].requests) == 0


async def test_however_many_requests_were_sent_again_lately() -> None:
    async with fleet(engine("a", 3), engine("b")) as (router, client, workers):
        budget = router.app._context.retries
        assert_whole((await ask(client, workers, "chat"))[1], "chat")
        assert repr(budget) == "<RetryBudget: 0.0 retries lately>"
        while budget.has(time.monotonic(), 0):
            budget.take()
        assert_whole((await ask(client, workers, "chat"))[1], "chat")
        assert migrations(router) == {"continued": 2}


async def test_none_unless_asked_for() -> None:
    async with fleet(engine("a", 3), engine("b"), migration_limit=0) as (router, client, workers):
        first, second = workers
        _, found = await ask(client, workers, "completions")
        assert (len(found.errors), found.ends) == (1, 0)
        assert first.requests[0].body == json.dumps(asking("completions")).encode()
        assert "router_migrations" not in generate_latest(router.app._metrics.registry).decode()
    assert second.requests == []


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"stop": "x"}, {"tools": [{}]}, {"logprobs": True}, {"presence_penalty": 1}]
)
async def test_what_cannot_go_on_ends_in_an_error(more: dict[str, Any]) -> None:
    async with fleet(engine("a", 4), engine("b")) as (router, client, workers):
        first, second = workers
        _, found = await ask(client, workers, "chat", **more)
        assert (len(found.errors), found.ends) == (1, 0)
        assert migrations(router) == {"refused": 1}
        assert "return_token_ids" not in json.loads(first.requests[0].body)
    assert second.requests == []


@pytest.mark.parametrize(
    ("script", "status"), [(answer(b"{}", 400), 502), (answer(b"{}", 200), 502), (answer(b"{}", 503), 502)]
)
async def test_nobody_who_goes_on(script: Script, status: int) -> None:
    async with fleet(engine("a", 4), script) as (router, client, workers):
        _, found = await ask(client, workers, "chat")
        (error,) = found.errors
        assert error["code"] == status
        assert migrations(router) == {"failed": 1}
        assert (await client.ask(get("/health"))).status == 200  # the client's connection goes on


async def test_the_only_worker() -> None:
    async with fleet(engine("a", 4)) as (router, client, workers):
        assert len((await ask(client, workers, "chat"))[1].errors) == 1
        assert migrations(router) == {"failed": 1}


async def test_a_worker_that_cannot_be_reached_takes_no_stream_over() -> None:
    """So that it is none of the times that a stream may go on."""
    async with fleet(engine("a", 4), engine("b"), engine("c")) as (router, client, workers):
        await workers[1].refuse()
        assert_whole((await ask(client, workers, "chat"))[1], "chat")
        assert migrations(router) == {"continued": 1}
        assert not router.is_up(workers[1])


@pytest.mark.parametrize("status", [429, 503])
async def test_nor_does_a_busy_one(status: int) -> None:
    busy = answer(b"{}", status)
    async with fleet(engine("a", 4), busy, busy, engine("d", 4), engine("e")) as (router, client, workers):
        _, found = await ask(client, workers, "chat")
        assert migrations(router) == {"continued": 1, "failed": 1}
        assert len(found.errors) == 1, "the second time is one too many"
        assert [len(worker.requests) for worker in workers] == [1, 1, 1, 1, 0]


async def test_a_stream_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL", 0.02)

    def stay(dialogue: Dialogue) -> None:
        """Says nothing more."""

    async with fleet(engine("a", 4, stay), engine("b"), idle_timeout=0.5) as (router, client, workers):
        first = workers[0]
        assert_whole((await ask(client, workers, "chat"))[1], "chat")
        assert migrations(router) == {"continued": 1}
        await until(lambda: first.dialogues[0].is_over)


async def test_a_request_whose_time_is_over_before_another_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL", 0.02)
    async with fleet(engine("a", 4), never, request_timeout=1.0) as (router, client, workers):
        _, found = await ask(client, workers, "chat")
        assert [error["code"] for error in found.errors] == [504]
        assert migrations(router) == {"failed": 1}


async def test_a_client_that_leaves_meanwhile() -> None:
    async def slow(dialogue: Dialogue) -> None:
        dialogue.events_head()
        await dialogue.gone.wait()

    async with fleet(engine("a", 4), slow) as (router, client, (first, second)):
        client.send(post(path_of("chat"), json.dumps(asking("chat")).encode()))
        await client.head()
        first.go_on.set()
        await until(lambda: second.dialogues)
        client.vanish()
        await until(lambda: second.dialogues[0].is_over)
        await router.at_rest()


async def test_the_prefill_of_the_rest_is_over_with_its_first_token() -> None:
    async with fleet(engine("a", 4), engine("b", 1)) as (router, client, (first, second)):
        client.send(post(path_of("completions"), json.dumps(asking("completions")).encode()))
        await client.head()
        first.go_on.set()
        await until(lambda: migrations(router) == {"continued": 1})
        loads = [router.samples(f"router_load_{what}") for what in ("requests", "prefill_tokens")]
        assert loads == [{"w1": 1}, {}]
        second.go_on.set()


async def test_a_worker_that_fails_before_its_first_token_is_no_migration() -> None:
    def dies_at_once(dialogue: Dialogue) -> None:
        says_that_it_died(dialogue)

    async with fleet(engine("a", 0, dies_at_once), engine("b")) as (router, client, workers):
        got, found = await ask(client, workers, "completions")
        assert_whole(found, "completions")
        assert got.header(b"x-router-worker") == b"w1"
        assert migrations(router) == {}


async def test_a_client_that_is_slow_slows_whoever_goes_on_too() -> None:
    told = {"id": "a", "object": "text_completion", "created": 1, "model": "tiny"}
    choice = {"index": 0, "text": "x" * 60_000, "finish_reason": None, "token_ids": [5]}

    async def flooding(dialogue: Dialogue) -> None:
        dialogue.events_head()
        dialogue.event(json.dumps({**told, "choices": [{**choice, "prompt_token_ids": PROMPT}]}).encode())
        while not dialogue.is_over and dialogue.sent < SIZE:
            dialogue.event(json.dumps({**told, "choices": [choice]}).encode())
            await dialogue.room()
            await asyncio.sleep(0)  # the other side shares this loop

    async with (
        fleet(flooding, flooding) as (router, _, workers),
        router.client(receive_buffer=4096, limit=4096) as client,
    ):
        client.send(post(path_of("completions"), json.dumps(asking("completions", max_tokens=4000)).encode()))
        await client.head()
        (connection,) = (each for each in router.app._clients.open if each.busy)
        await until(lambda: connection._paused)
        router.app._fleet.workers["w0"].pool.cut("was removed")
        await until(lambda: workers[1].dialogues)
        await until(lambda: workers[1].dialogues[0].sent >= SIZE or router_waits(router))
        assert connection._transport.get_write_buffer_size() < 2**20
        client.vanish()


def router_waits(router: RunningRouter) -> bool:
    """Its connection to the second worker is not read."""
    return any(connection.paused for connection in router.app._fleet.workers["w1"].pool._open)


async def test_what_another_answers_to_a_retry_is_not_judged_by_the_stream_that_never_began() -> None:
    refused = b'{"error":{"message":"bad","code":400}}'
    async with fleet(engine("a", 0), answer(refused, 400), engine("c")) as (router, client, workers):
        asked = post(path_of("completions"), json.dumps(asking("completions")).encode())
        got = await client.ask(asked)
        assert (got.status, got.body) == (400, refused)
        await router.at_rest()
        assert [len(worker.requests) for worker in workers] == [1, 1, 0]
        assert (await client.ask(asked)).status == 200  # nothing came after the answer


@pytest.mark.parametrize("objective", [{"ttft_slo": 1e-9}, {"tbt_slo": 1e-9}])
async def test_objectives_are_for_who_has_nothing_yet(objective: dict[str, Any]) -> None:
    """What was made of the answer would be lost."""
    async with fleet(engine("a", 4), engine("b"), router_mode="kv", kv_events=False, **objective) as found:
        router, client, workers = found
        workers[1].then(never)  # so that it is no idle worker, which is always asked
        async with router.client() as other:
            other.send(post(path_of("chat"), json.dumps(asking("chat")).encode(), b"x-router-target-worker: w1"))
            await until(lambda: workers[1].requests)
            assert_whole((await ask(client, workers, "chat"))[1], "chat")
            assert migrations(router) == {"continued": 1}
            other.vanish()


async def test_nor_is_the_queue_full_for_the_rest() -> None:
    """It goes before all who wait, even the most urgent: they have nothing yet, and may ask again."""
    limits: dict[str, Any] = {"max_worker_concurrency": 1, "max_queue": 1}
    async with fleet(engine("a", 4), engine("b"), **limits) as (router, client, workers), router.client() as other:
        client.send(post(path_of("chat"), json.dumps(asking("chat")).encode()))
        await client.head()
        workers[1].then(held_stream)
        async with router.client() as busy:
            busy.send(post())
            await until(lambda: workers[1].requests)
            other.send(post(path_of("chat"), json.dumps(asking("chat")).encode(), b"x-router-priority: -2147483648"))
            await until(lambda: router.total("router_queue_length") == 1)
            workers[0].go_on.set()
            displaced = await other.answer()
            assert (displaced.status, json.loads(displaced.body)["error"]["code"]) == (429, "queue_full")
            workers[1].go_on.set()
            body = b"".join([content async for content in contents(client)])
        assert_whole(seen(body), "chat")
        assert migrations(router) == {"continued": 1}


async def test_the_rest_goes_where_its_prefix_is() -> None:
    """The tokens so far are the prompt that the next worker is chosen and booked by."""
    async with fleet(engine("a", 9), engine("b"), router_mode="kv", kv_events=False) as (router, client, workers):
        asked = []
        await ask(client, workers, "completions")
        for worker in workers:
            asked += [json.loads(request.body)["prompt"] for request in worker.requests]
        assert len(asked) == 2 or asked == [PROMPT]  # whichever was asked first
        tokens = router.total("router_prompt_tokens_total")
        assert tokens == sum(map(len, asked))
