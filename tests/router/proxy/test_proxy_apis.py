"""Requests whose prompts no tokenizer here knows go where what they begin with was sent."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from router.tokens.stand_ins import stand_ins
from tests.fakes.raw_client import Answered, RawClient, post
from tests.fakes.scripted_worker import ScriptedWorker, answer
from tests.router.proxy.running import running

LONG = "Read the file before you change it, and say what you have changed. " * 20
TOOLS = [{"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}]
CONVERSATIONS: Mapping[str, tuple[dict[str, object], str]] = {  # and where the messages belong
    "/v1/messages": ({"system": LONG, "tools": TOOLS}, "messages"),
    "/v1/responses": ({"instructions": LONG, "tools": TOOLS}, "input"),
    "/v1/chat/completions": ({"tools": []}, "messages"),
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


async def turn(client: RawClient, path: str, who: int, turns: int, **more: object) -> Answered:
    """One more turn of `who`'s conversation."""
    fields, name = CONVERSATIONS[path]
    said: list[object] = [
        {"role": "user", "content": [{"type": "text", "text": f"{who} is my number. " + LONG}, IMAGE]}
    ]
    said += [{"role": "user", "content": f"Go on with {number}. {LONG}"} for number in range(turns)]
    return await client.ask(post(path, json.dumps({"model": "tiny", **fields, name: said, **more}).encode()))


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_conversations_go_on_where_they_were(a: ScriptedWorker, b: ScriptedWorker, path: str) -> None:
    async with running(a, b, router_mode="kv", kv_policy="overlap") as router, router.client() as client:
        places: dict[int, set[bytes | None]] = {}
        for turns in range(4):
            for who in range(6):
                own = {name: f"{who}: {LONG}" for name in ("system", "instructions") if name in CONVERSATIONS[path][0]}
                got = await turn(client, path, who, turns, **own)
                assert got.status == 200
                places.setdefault(who, set()).add(got.header(b"x-router-worker"))
                assert turns == 0 or int(got.header(b"x-router-overlap-tokens") or 0) > 1300
        assert all(len(workers) == 1 for workers in places.values())
        assert len(set.union(*places.values())) == 2, "and not all to one"


async def test_a_text_is_found_again_in_the_list_that_continues_it(a: ScriptedWorker) -> None:
    """Engines make a user's message of it, and clients send it as one with the next turn."""
    async with running(a, router_mode="kv") as router, router.client() as client:
        said = {"role": "user", "content": LONG}
        turns = (LONG, [said, {"type": "message", "role": "assistant", "content": "Done."}, said])
        got = [await turn(client, "/v1/responses", 0, 0, tools=[], instructions="", input=each) for each in turns]
        assert int(got[1].header(b"x-router-overlap-tokens") or 0) > 300


async def test_a_billing_header_that_is_another_each_time_hides_no_prefix(a: ScriptedWorker) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        for turns in range(3):
            billed = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.177; cch={turns};"}
            got = await turn(client, "/v1/messages", 0, turns, system=[billed, {"type": "text", "text": LONG}])
            assert turns == 0 or int(got.header(b"x-router-overlap-tokens") or 0) > 1300


async def test_nothing_is_saved_by_what_is_there_if_the_prompts_log_probabilities_are_wanted(a: ScriptedWorker) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        overlaps = []
        for more in ({}, {"echo": True}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}, {}):
            body = {"model": "tiny", "prompt": list(range(320)), **more}
            got = await client.ask(post("/v1/completions", json.dumps(body).encode()))
            overlaps.append(int(got.header(b"x-router-overlap-tokens") or -1) > 300)
        assert overlaps == [False, True, False, False, True]


async def test_errors_have_the_types_that_anthropics_clients_know(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        await a.refuse()
        got = [await turn(client, "/v1/messages", 0, 0) for _ in range(2)]
    told = [(each.status, json.loads(each.body)["error"]["type"]) for each in got]
    assert told == [(502, "api_error"), (503, "overloaded_error")]  # found down, then known to be


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_what_was_expected_and_reported_is_told(a: ScriptedWorker, path: str) -> None:
    usage = {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 1}
    a.then(answer(json.dumps({"usage": usage}).encode()))
    async with running(a, router_mode="kv") as router, router.client() as client:
        await turn(client, path, 0, 0)
        assert router.total("router_untokenized_requests_total", reason="api") == 1
        assert router.total("router_reported_cached_tokens_total") == 2
        fields, _ = CONVERSATIONS[path]
        text = f"0 is my number. {LONG}"
        said = stand_ins([LONG, fields["tools"], {"role": "user", "content": [text, IMAGE]}])
        assert router.total("router_prompt_tokens_total") == len(said)


@pytest.mark.parametrize(
    "body",
    [b"[]", b"5", b"{}", b'{"messages":5}', b'{"messages":null,"stream":1}', b'{"model":"tiny","seed":1e999}',
     b'{"system":["a",{"b":[1]}],"cache_salt":[1]}'],
)  # fmt: skip
async def test_what_is_no_prompt_is_for_the_engine_to_judge(a: ScriptedWorker, body: bytes) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        assert (await client.ask(post("/v1/messages", body))).status == 200
    assert a.requests[-1].body == body


async def test_other_modes_read_no_prompts(a: ScriptedWorker) -> None:
    async with running(a, router_mode="round-robin") as router, router.client() as client:
        assert (await turn(client, "/v1/messages", 0, 0)).header(b"x-router-overlap-tokens") is None
        assert router.total("router_untokenized_requests_total") == 0


async def test_salts_models_and_apis_share_nothing(a: ScriptedWorker) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        for path, more in (
            ("/v1/messages", {}), ("/v1/messages", {"cache_salt": "s"}), ("/v1/messages", {"model": "other"}),
        ):  # fmt: skip
            first = await turn(client, path, 0, 0, **more)
            again = await turn(client, path, 0, 0, **more)
            overlaps = [each.header(b"x-router-overlap-tokens") for each in (first, again)]
            assert overlaps[0] == b"0"
            assert int(overlaps[1] or 0) > 1300
