"""The simulated worker's HTTP over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tracemalloc
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from engines.sim.answering import Answer
from engines.sim.fleet import SimFleet
from engines.sim.server import make_app
from engines.sim.timing import StepTiming
from indexer.hashing import chain_hashes, pack_tokens, root_hash
from indexer.types import Namespace
from tests.engines.sim.fleets import BLOCK, INSTANT, Client, client, events, settings
from tests.fakes.waiting import until

TOKENS = list(range(100, 140))
SLOW = StepTiming(base_s=3600.0)
"""A step that ends after any test."""


async def test_a_completion() -> None:
    async with client() as worker:
        answer = await worker.complete(TOKENS, 4)
        choice = answer["choices"][0]
        assert answer["model"] == "sim"
        assert choice["finish_reason"] == "length"
        assert len(choice["text"]) == 4
        counts = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert counts == {"prompt_tokens": 40, "completion_tokens": 4, "total_tokens": 44}
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_greedy_repeats_are_equal_and_cached() -> None:
    async with client() as worker:
        first, second = [await worker.complete(TOKENS, 20) for _ in range(2)]
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert first["id"] != second["id"]


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
@pytest.mark.parametrize("max_tokens", [1, 2, 30])
async def test_a_stream_says_what_the_whole_answer_does(flavour: str, max_tokens: int) -> None:
    async with client(flavour=flavour) as worker:
        whole = await worker.complete(TOKENS, max_tokens)
        options = {"include_usage": True}
        *chunks, usage, done = await worker.stream(
            "/v1/completions", {"prompt": TOKENS, "max_tokens": max_tokens, "stream_options": options}
        )
        assert done == "[DONE]"
        assert [len(chunk["choices"]) for chunk in chunks] == [1] * max_tokens
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (max_tokens - 1) + ["length"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == max_tokens
        assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


@pytest.mark.parametrize("options", [None, {"include_usage": True, "continuous_usage_stats": True}])
async def test_a_client_that_knows_no_chunks_reads_its_stream_until_the_connection_ends(options: Any) -> None:
    """Though it asks for keep-alive, as this one does."""
    old = aiohttp.ClientSession(version=aiohttp.HttpVersion10, timeout=aiohttp.ClientTimeout(30))
    async with client() as worker, old:
        body = {"prompt": TOKENS, "max_tokens": 5, "stream_options": options}
        await worker.complete(TOKENS)  # both streams find the prompt cached
        told = [await each.stream("/v1/completions", body) for each in (worker, Client(old, worker.fleet))]
        assert told[0].pop() == told[1].pop() == "[DONE]"
        first, second = ([(chunk["choices"], chunk.get("usage")) for chunk in chunks] for chunks in told)
        assert first == second


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
async def test_a_chat_stream_opens_with_the_role(flavour: str) -> None:
    async with client(flavour=flavour) as worker:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 5}
        _, whole = await worker.post("/v1/chat/completions", body)
        *chunks, done = await worker.stream("/v1/chat/completions", body)
        assert done == "[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["role"] == "assistant"
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert text == whole["choices"][0]["message"]["content"]
        assert len(text) == 5
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_continuous_usage_counts_up() -> None:
    async with client() as worker:
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last, _ = await worker.stream(
            "/v1/completions", {"prompt": TOKENS, "max_tokens": 3, "stream_options": options}
        )
        assert [chunk["usage"]["completion_tokens"] for chunk in [*chunks, last]] == [1, 2, 3, 3]


async def test_several_prompts_share_an_answer() -> None:
    async with client() as worker:
        body = {"prompt": ["alpha", [1, 2, 3]], "max_tokens": 3}
        alone = [(await worker.complete(prompt, 3))["choices"][0]["text"] for prompt in ("alpha", [1, 2, 3])]
        _, whole = await worker.post("/v1/completions", body)
        assert [choice["text"] for choice in whole["choices"]] == alone
        assert [choice["index"] for choice in whole["choices"]] == [0, 1]
        assert whole["usage"]["prompt_tokens"] == 8
        *chunks, done = await worker.stream("/v1/completions", body)
        assert done == "[DONE]"
        for index in range(2):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in mine) == alone[index]


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
async def test_several_answers_to_each_prompt(flavour: str) -> None:
    """The prompt counts once. Usual sampling makes them differ, and the first is what it would be alone."""
    async with client(flavour=flavour) as worker:
        body = {"prompt": [TOKENS, "beta"], "max_tokens": 20, "n": 3}
        first = [(await worker.complete(prompt, 20))["choices"][0]["text"] for prompt in (TOKENS, "beta")]
        _, whole = await worker.post("/v1/completions", body)
        texts = [choice["text"] for choice in whole["choices"]]
        assert [choice["index"] for choice in whole["choices"]] == [*range(6)]
        assert [texts[0], texts[3]] == first
        assert len({*texts}) == 6
        counts = [whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        assert counts == [44, 120, 164]
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        *chunks, done = await worker.stream("/v1/completions", body)
        assert done == "[DONE]"
        said = [chunk["choices"][0] for chunk in chunks]
        assert texts == ["".join(each["text"] for each in said if each["index"] == index) for index in range(6)]


async def test_several_answers_to_a_chat() -> None:
    async with client() as worker:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "n": 2}
        _, whole = await worker.post("/v1/chat/completions", body)
        chunks = (await worker.stream("/v1/chat/completions", body))[:-1]
        for index, choice in enumerate(whole["choices"]):
            mine = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert mine[0]["role"] == "assistant"
            assert "".join(delta["content"] for delta in mine) == choice["message"]["content"]


async def test_sglang_minds_no_stream_options_but_more_tokens_at_least_than_at_most() -> None:
    async with client(flavour="sglang") as worker:
        await worker.complete(TOKENS, stream_options={"include_usage": True})
        status, answer = await worker.post("/v1/completions", {"prompt": TOKENS, "max_tokens": 4, "min_tokens": 5})
        assert (status, answer["message"]) == (400, "min_new_tokens must be in [0, max_new_tokens(4)], got 5.")


@pytest.mark.parametrize(
    ("flavour", "stream", "status"), [("sglang", True, 400), ("sglang", False, 200), ("vllm", True, 200)]
)
async def test_sglang_streams_no_token_ids_of_chats(flavour: str, stream: bool, status: int) -> None:
    async with client(flavour=flavour) as worker:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "return_token_ids": True}
        assert (await worker.post("/v1/chat/completions", {**body, "stream": stream}))[0] == status


async def test_sglang_gives_several_greedy_answers() -> None:
    async with client(flavour="sglang") as worker:
        assert len((await worker.complete(TOKENS, n=2, temperature=0))["choices"]) == 2


async def test_a_follow_up_chat_finds_the_answer_in_the_cache() -> None:
    async with client() as worker:
        turns = [{"role": "user", "content": "tell me of prefixes"}]
        _, first = await worker.post("/v1/chat/completions", {"messages": turns, "max_tokens": 100})
        said = first["choices"][0]["message"]
        turns += [{"role": said["role"], "content": said["content"]}, {"role": "user", "content": "go on"}]
        _, second = await worker.post("/v1/chat/completions", {"messages": turns, "max_tokens": 1})
        known = first["usage"]["total_tokens"] - 1
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16


async def test_a_chat_without_max_tokens_stops_by_itself() -> None:
    async with client() as worker:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        _, answer = await worker.post("/v1/chat/completions", body)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert 64 <= answer["usage"]["completion_tokens"] < 256
        _, longer = await worker.post("/v1/chat/completions", {**body, "min_tokens": 400})
        assert longer["usage"]["completion_tokens"] == 400


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
async def test_a_chat_that_fills_the_context_did_not_stop_by_itself(flavour: str) -> None:
    async with client(flavour=flavour, max_model_len=100) as worker:
        _, answer = await worker.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
        assert answer["usage"]["total_tokens"] == 100
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_token_ids_come_back_when_asked_for() -> None:
    async with client() as worker:
        choice = (await worker.complete(TOKENS, 20, return_token_ids=True))["choices"][0]
        assert choice["prompt_token_ids"] == TOKENS
        again = await worker.complete(TOKENS + choice["token_ids"], 1)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        assert bytes(token - 3 for token in choice["token_ids"]).decode() == choice["text"]


async def test_a_chat_takes_ids_made_elsewhere() -> None:
    async with client() as worker:
        body = {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {"prompt_token_ids": TOKENS}}
        _, answer = await worker.post("/v1/chat/completions", {**body, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == 40


@pytest.mark.parametrize(
    ("flavour", "apart"),
    [
        *((flavour, {"cache_salt": "tenant"}) for flavour in ("vllm", "sglang")),
        ("vllm", {"model": "adapter"}),
        ("sglang", {"model": "sim:adapter"}),
    ],
)
async def test_salts_and_adapters_share_no_prefix(flavour: str, apart: dict[str, str]) -> None:
    async with client(flavour=flavour, loras=("adapter",)) as worker:
        cached = []
        for fields in ({}, apart, apart, {}):
            answer = await worker.complete(TOKENS, 1, **fields)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 32, 32]


async def test_sglang_computes_the_base_model_for_an_adapters_bare_name() -> None:
    async with client(flavour="sglang", loras=("adapter",)) as worker:
        await worker.complete(TOKENS, 1)
        answer = await worker.complete(TOKENS, 1, model="adapter")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_tokenize_answers_the_ids_that_are_cached(path: str) -> None:
    async with client(flavour="sglang") as worker:
        messages = [{"role": "user", "content": "a question that fills a block"}]
        _, tokens = await worker.post(path, {"messages": messages, "add_generation_prompt": True})
        await worker.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        answer = await worker.complete(tokens["tokens"], 1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (tokens["count"] - 1) // 16 * 16
        assert (await worker.post(path, {"prompt": "ab"}))[1]["tokens"] == [100, 101]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"prompt": ', 400, "cannot be read"),
        (b"\xff", 400, "cannot be read"),
        ({"prompt": TOKENS, "model": "nope"}, 404, "The model `nope` does not exist"),
        ({"prompt": [7] * 4000}, 400, "maximum context length is 3200 tokens"),
        ({"prompt": [7] * 3000, "max_tokens": 300}, 400, "300 output tokens"),
        ({"prompt": TOKENS, "max_tokens": 0}, 400, "at least 1"),
        ({"prompt": TOKENS, "n": 0}, 400, "n must be from 1"),
        ({"prompt": TOKENS, "n": 20_000}, 400, "n must be from 1"),
        ({"prompt": TOKENS, "n": 2, "temperature": 0}, 400, "greedy"),
        ({"prompt": TOKENS, "stream_options": {"include_usage": True}}, 400, "when `stream=True`"),
        ({"prompt": TOKENS, "max_tokens": 4, "min_tokens": 5}, 400, "max_tokens=4, got 5"),
        ({"prompt": TOKENS, "min_tokens": 20}, 400, "max_tokens=16, got 20"),
        ({"prompt": []}, 400, "prompt must be"),
        ({}, 400, "prompt must be"),
        ({"prompt": [1, "x"]}, 400, "prompt must be"),
        ({"prompt": ""}, 400, "prompt cannot be empty"),
        ({"prompt": ["x", ""]}, 400, "prompt cannot be empty"),
        ({"prompt": [-1]}, 400, "prompt must be"),
        ({"prompt": [["x"]]}, 400, "prompt must be"),
        ({"prompt": [2**32]}, 400, "prompt must be"),
    ],
)
async def test_refusals(body: Any, status: int, says: str) -> None:
    async with client() as worker:
        got, answer = await worker.post("/v1/completions", body)
        assert got == status
        assert says in answer["error"]["message"]
        assert answer["error"]["code"] == status
        assert not worker.scheduler.busy
        assert worker.worker.in_flight == 0


@pytest.mark.parametrize("messages", [None, [], [{"content": "no role"}]])
async def test_chats_that_are_none(messages: Any) -> None:
    async with client() as worker:
        status, answer = await worker.post("/v1/chat/completions", {"messages": messages})
        assert status == 400
        assert answer["error"]["param"] == "messages"


async def test_sglang_takes_any_model_name_and_refuses_in_its_own_shape() -> None:
    async with client(flavour="sglang") as worker:
        assert (await worker.complete(TOKENS, 1, model="nope"))["model"] == "nope"
        status, answer = await worker.post("/v1/completions", {"prompt": [7] * 4000})
        assert status == 400
        assert answer["object"] == "error"
        assert "longer than the model's context length (3200 tokens)" in answer["message"]


async def test_a_clients_request_id_names_the_answer_even_twice_at_once() -> None:
    async with client() as worker:
        body = {"prompt": TOKENS, "max_tokens": 5}
        answers = await asyncio.gather(*(worker.post("/v1/completions", body, X_Request_Id="mine") for _ in range(2)))
        assert [answer["id"] for _, answer in answers] == ["cmpl-mine"] * 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_aborts_and_frees(stream: bool) -> None:
    async with client(timing=SLOW) as worker:
        body = {"prompt": [TOKENS, TOKENS[:20]], "max_tokens": 9, "stream": stream}
        asking = asyncio.create_task(worker.post("/v1/completions", body))
        await until(lambda: worker.scheduler.busy)
        assert worker.scheduler.cache.usage > 0
        asking.cancel()
        await until(lambda: not worker.scheduler.busy)
        assert worker.scheduler.cache.usage == 0
        await until(lambda: worker.worker.in_flight == 0)
        assert worker.scheduler.counters.aborted_requests == 2
        worker.scheduler.cache.check_integrity()


async def test_a_client_that_leaves_as_its_stream_begins_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def left(http: web.Request) -> web.StreamResponse:
        assert http.transport is not None
        http.transport.abort()
        response = web.StreamResponse()
        await response.prepare(http)
        return response

    async with client() as worker:
        app = make_app(worker.worker)
        app.router.add_get("/left", left)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            with pytest.raises(aiohttp.ClientError):
                await worker.session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/left")
        finally:
            await runner.cleanup()
    assert caplog.messages == []


@pytest.mark.parametrize(("flavour", "begun"), [("vllm", True), ("sglang", False)])
async def test_whether_a_stream_begins_before_its_first_token(flavour: str, begun: bool) -> None:
    """SGLang waits for it, to answer with an error's own status if there is none."""
    async with client(flavour=flavour, timing=SLOW) as worker:
        asked = {"prompt": TOKENS, "stream": True}
        asking = asyncio.create_task(worker.session.post(worker.url + "/v1/completions", json=asked))
        await until(lambda: worker.scheduler.busy)
        await worker.get("/health")  # what was written before is read before
        assert asking.done() == begun
        if begun:
            (await asking).close()
        asking.cancel()


async def test_leaving_the_fleet_cuts_streams() -> None:
    async with aiohttp.ClientSession() as session:
        async with SimFleet(settings(timing=SLOW)) as fleet:
            asked = {"prompt": TOKENS, "max_tokens": 9, "stream": True}
            response = await session.post(fleet.urls[0] + "/v1/completions", json=asked)
        async with response:
            assert await read_until_cut(response) == b""


async def test_a_connection_without_requests_is_closed_as_engines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.sim.fleet.IDLE_SECONDS", 0.01)
    async with client() as worker:
        address = urlsplit(worker.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: sim\r\n\r\n")
        async with asyncio.timeout(30):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await writer.wait_closed()


async def test_metrics_and_load_show_what_runs() -> None:
    async with client(timing=SLOW, max_num_seqs=1) as worker:
        asking = [asyncio.create_task(worker.post("/v1/completions", {"prompt": TOKENS})) for _ in range(2)]
        await until(lambda: worker.scheduler.waiting)
        text = await worker.get("/metrics")
        assert 'vllm:num_requests_running{engine="0",model_name="sim"} 1.0' in text
        assert 'vllm:num_requests_waiting{engine="0",model_name="sim"} 1.0' in text
        assert re.search(r"vllm:kv_cache_usage_perc\{[^}]*\} 0\.015", text)
        assert 'block_size="16"' in text
        assert 'num_gpu_blocks="200"' in text
        assert await worker.get("/load") == {"server_load": 2}
        for task in asking:
            task.cancel()


async def test_metrics_count_hits_in_tokens() -> None:
    async with client() as worker:
        for _ in range(2):
            await worker.complete(TOKENS, 3)
        text = await worker.get("/metrics")
        assert 'vllm:prefix_cache_queries_total{engine="0",model_name="sim"} 80.0' in text
        assert 'vllm:prefix_cache_hits_total{engine="0",model_name="sim"} 32.0' in text
        assert 'vllm:generation_tokens_total{engine="0",model_name="sim"} 6.0' in text


async def test_plain_pages() -> None:
    async with client(model="m", max_model_len=500, loras=("adapter",)) as worker:
        assert await worker.get("/health") == ""
        assert (await worker.get("/version"))["version"] == "0.32.0"
        cards = (await worker.get("/v1/models"))["data"]
        assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
            ("m", None, 500),
            ("adapter", "m", None),
        ]


async def test_ranks_have_caches_of_their_own() -> None:
    async with client(dp_size=2) as worker:
        cached = []
        for rank in ("0", "1", "1"):
            body = {"prompt": TOKENS, "max_tokens": 1}
            _, answer = await worker.post("/v1/completions", body, X_data_parallel_rank=rank)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 32]


@pytest.mark.parametrize("rank", ["2", "-1", "x"])
async def test_there_is_no_such_rank(rank: str) -> None:
    async with client(dp_size=2) as worker:
        assert (await worker.post("/v1/completions", {"prompt": TOKENS}, X_data_parallel_rank=rank))[0] == 400


async def test_sglang_reads_the_rank_from_the_body_too() -> None:
    async with client(flavour="sglang", dp_size=2) as worker:
        await worker.complete(TOKENS, 1, routed_dp_rank=1)
        assert [rank.scheduler.counters.finished_requests for rank in worker.worker.ranks] == [0, 1]


async def test_without_a_rank_the_least_loaded_takes_it() -> None:
    async with client(dp_size=3, timing=SLOW) as worker:
        asking = [asyncio.create_task(worker.post("/v1/completions", {"prompt": TOKENS})) for _ in range(6)]
        await until(lambda: worker.worker.in_flight == 6)
        schedulers = [rank.scheduler for rank in worker.worker.ranks]
        await until(lambda: sum(len(each.running) + len(each.waiting) for each in schedulers) == 6)
        assert [len(each.running) + len(each.waiting) for each in schedulers] == [2, 2, 2]
        for task in asking:
            task.cancel()


async def arm(worker: Client, **fault: Any) -> None:
    assert (await worker.post("/sim/fault", fault))[0] == 200


@pytest.mark.parametrize(("kind", "status"), [("error429", 429), ("error500", 500), ("error503", 503)])
async def test_armed_errors_strike_as_often_as_said(kind: str, status: int) -> None:
    async with client() as worker:
        await arm(worker, kind=kind, count=2)
        got = [(await worker.post("/v1/completions", {"prompt": TOKENS}))[0]]
        assert await worker.get("/sim/faults") == {"armed": 1, "struck": {kind: 1}}
        got += [(await worker.post("/v1/completions", {"prompt": TOKENS}))[0] for _ in range(2)]
        assert got == [status, status, 200]
        assert await worker.get("/sim/faults") == {"armed": 0, "struck": {kind: 2}}


@pytest.mark.parametrize("kind", ["error500", "transfer_fails"])
async def test_a_fault_for_all_requests_to_come_takes_no_memory_for_each(kind: str) -> None:
    async with client() as worker:
        tracemalloc.start()
        await arm(worker, kind=kind, count=10**7)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10**7
        assert (await worker.get("/sim/faults"))["armed"] == 10**7


async def test_what_the_cache_holds_is_told() -> None:
    async with client(dp_size=2) as worker:
        body = {"prompt": TOKENS, "max_tokens": 1}
        assert (await worker.post("/v1/completions", body, X_data_parallel_rank="1"))[0] == 200
        ours = chain_hashes(pack_tokens(TOKENS), BLOCK, root_hash(Namespace())).tolist()
        told = await worker.get("/sim/cache")
        assert [sorted(held) for held in told["ranks"]] == [[], sorted(ours)]


async def test_a_connection_cut_before_the_first_byte() -> None:
    async with client() as worker:
        await arm(worker, kind="drop_before_first_byte")
        with pytest.raises(aiohttp.ClientConnectionError):
            await worker.complete(TOKENS)
        await worker.complete(TOKENS)


async def read_until_cut(response: aiohttp.ClientResponse) -> bytes:
    """What came before the connection broke off in the middle of the body."""
    received = b""
    try:
        while piece := await response.content.readany():
            received += piece
    except aiohttp.ClientPayloadError:
        return received
    raise AssertionError("the body came to its end")


@pytest.mark.parametrize("after", [0, 2])
async def test_a_stream_cut_after_some_tokens(after: int) -> None:
    async with client() as worker:
        await arm(worker, kind="break_after_tokens", after=after)
        body = {"prompt": TOKENS, "max_tokens": 9, "stream": True}
        async with worker.session.post(worker.url + "/v1/completions", json=body) as response:
            received = await read_until_cut(response)
        assert len(events(received) if received else []) == after
        await until(lambda: not worker.scheduler.busy)
        assert worker.scheduler.counters.aborted_requests == 1


async def test_no_token_is_written_to_a_connection_that_is_gone() -> None:
    """uvloop's transports raise then, which would stop the whole rank."""

    class Transport(asyncio.Transport):
        closed = False

        def is_closing(self) -> bool:
            return self.closed

    nothing: Any = None
    transport = Transport()
    answer = Answer(nothing, nothing, [], nothing, nothing, transport, nothing)
    assert not answer.broken()
    transport.closed = True
    assert answer.broken()


async def test_a_hanging_request_ends_with_its_client() -> None:
    async with client() as worker:
        await arm(worker, kind="hang")
        asking = asyncio.create_task(worker.complete(TOKENS))
        await until(lambda: worker.worker.in_flight == 1)
        await worker.complete(TOKENS)  # others are served meanwhile
        assert not asking.done()
        asking.cancel()
        await until(lambda: worker.worker.in_flight == 0)


async def test_slowness_comes_and_goes() -> None:
    async with client(slow={0: 2.0}) as worker:
        assert worker.scheduler.slowdown == 2.0
        await arm(worker, kind="slow", factor=5.0)
        assert worker.scheduler.slowdown == 10.0
        await arm(worker, kind="error500")
        assert (await worker.post("/sim/faults/clear"))[0] == 200
        assert worker.scheduler.slowdown == 2.0
        await worker.complete(TOKENS)


@pytest.mark.parametrize("fault", [{"kind": "nonsense"}, {}, {"kind": "hang", "oops": 1}])
async def test_unknown_faults_are_refused(fault: dict[str, Any]) -> None:
    async with client() as worker:
        assert (await worker.post("/sim/fault", fault))[0] == 400


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "hang", "count": 0},
        {"kind": "hang", "count": -1},
        {"kind": "transfer_fails", "count": 0},
        {"kind": "break_after_tokens", "after": -1},
        {"kind": "slow", "factor": 0},
        {"kind": "slow", "factor": -1},
    ],
)
async def test_faults_that_could_not_strike_are_refused(fault: dict[str, Any]) -> None:
    async with client() as worker:
        assert (await worker.post("/sim/fault", fault))[0] == 400
        assert (await worker.get("/sim/faults"))["armed"] == 0
        assert worker.scheduler.slowdown == 1.0


async def test_time_is_scaled() -> None:
    """A simulated hour for the first step, played back within the test's own time."""
    async with client(timing=SLOW, speedup=1e6) as worker:
        await worker.complete(TOKENS, 1)
        assert worker.scheduler.counters.first_token_seconds >= 3600


async def test_a_fleets_workers_are_apart() -> None:
    async with SimFleet(settings(workers=2, timing=INSTANT)) as fleet, aiohttp.ClientSession() as session:
        first, second = (Client(session, fleet, index) for index in range(2))
        await first.complete(TOKENS)
        answer = await second.complete(TOKENS)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert first.scheduler.counters.finished_requests == second.scheduler.counters.finished_requests == 1


@pytest.mark.parametrize("body", [gzip.compress(b'{"prompt": "x"}'), b'{"prompt": "x"}'], ids=["gzip", "plain"])
async def test_no_body_is_decompressed(body: bytes) -> None:
    async with client() as worker:
        status = 200 if body.startswith(b"{") else 400
        assert (await worker.post("/v1/completions", body, Content_Encoding="gzip"))[0] == status


async def test_json_bodies_need_no_content_type() -> None:
    async with client() as worker:
        body = json.dumps({"prompt": "x"}).encode()
        async with worker.session.post(
            worker.url + "/v1/completions", data=body, headers={"Content-Type": "text/plain"}
        ) as response:
            assert response.status == 200
