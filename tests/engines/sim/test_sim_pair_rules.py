"""Each single thing that is wrong on the wire is an error, is written down, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.sim.fleets import Json
from tests.engines.sim.pairs import TOKENS, Pair, pair
from tests.fakes.waiting import until

BODY: Json = {"prompt": TOKENS, "max_tokens": 3}
Change = Callable[[Json], Json]


def setting(**fields: Any) -> Change:
    return lambda body: {**body, **fields}


def without(name: str) -> Change:
    return lambda body: {field: value for field, value in body.items() if field != name}


def params(change: Change) -> Change:
    return lambda body: {**body, "kv_transfer_params": change(body["kv_transfer_params"])}


def same(body: Json) -> Json:
    return body


async def refused(both: Pair, answer: tuple[int, Any], says: str, status: int = 500) -> None:
    """Told in the engine's words, and why in ours."""
    assert answer[0] == status, answer
    if status == 500 and both.connector != "sglang":
        assert answer[1]["error"]["message"] == "Internal server error"
    violations = await both.violations()
    assert len(violations) == 1
    assert says in violations[0]


NIXL_KEYS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
    "remote_prefill_cached_tokens",
)


async def prefilled(both: Pair) -> Json:
    status, answer = await both.ask_prefill(both.prefill_body(BODY))
    assert status == 200
    found: Json = answer["kv_transfer_params"]
    return found


async def test_nixl_hands_out_these_parameters() -> None:
    async with pair("nixl") as both:
        handed = await prefilled(both)
        assert sorted(handed) == sorted(NIXL_KEYS)
        assert (handed["do_remote_prefill"], handed["do_remote_decode"], handed["transfer_mode"]) == (
            True,
            False,
            "pull",
        )
        assert (handed["remote_num_tokens"], len(handed["remote_block_ids"][0])) == (40, 3)


@pytest.mark.parametrize("name", NIXL_KEYS)
@pytest.mark.parametrize("change", ["missing", "altered"])
async def test_nixl_takes_parameters_only_as_they_were(name: str, change: str) -> None:
    async with pair("nixl", lease_s=1e6) as both:
        handed = await prefilled(both)
        broken = without(name)(handed) if change == "missing" else {**handed, name: "other"}
        answer = await both.ask_decode(both.decode_body(BODY, broken))
        says = {"do_remote_prefill": "a decode without", "remote_request_id": "was never offered"}.get(name, name)
        await refused(both, answer, says)
        assert (await both.ask_decode(both.decode_body(BODY, handed)))[0] == 200
        await both.settled()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (setting(remote_prefill_cached_tokens=False), "remote_prefill_cached_tokens"),  # 0, but not the same
        (setting(tp_size=1.0), "tp_size"),
        (setting(transfer_id="x"), "transfer_id"),
        (setting(do_remote_decode=True), "a decode without"),
    ],
)
async def test_nixl_takes_nothing_more_and_nothing_alike(change: Change, says: str) -> None:
    async with pair("nixl", lease_s=1e6) as both:
        await refused(both, await both.ask_decode(both.decode_body(BODY, change(await prefilled(both)))), says)


async def test_nixl_takes_the_tokens_of_a_chat_beside_its_parameters() -> None:
    async with pair("nixl") as both:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        tokens = {"prompt_token_ids": TOKENS}
        body = both.prefill_body(chat)
        body["kv_transfer_params"] |= tokens
        _, first = await both.ask_prefill(body, "/v1/chat/completions")
        handed = {**first["kv_transfer_params"], **tokens}
        status, _ = await both.ask_decode({**chat, "kv_transfer_params": handed}, "/v1/chat/completions")
        assert (status, await both.violations()) == (200, [])


async def test_nixl_parameters_are_used_once() -> None:
    async with pair("nixl") as both:
        handed = await prefilled(both)
        assert (await both.ask_decode(both.decode_body(BODY, handed)))[0] == 200
        await refused(both, await both.ask_decode(both.decode_body(BODY, handed)), "was used before")
        await both.settled()


async def test_nixl_parameters_end_with_their_lease() -> None:
    async with pair("nixl", speedup=1000.0) as both:
        handed = await prefilled(both)
        await until(lambda: not both.prefill.scheduler.kept)
        await refused(both, await both.ask_decode(both.decode_body(BODY, handed)), "until its lease was over")


async def test_nixl_parameters_are_for_their_prompt() -> None:
    async with pair("nixl") as both:
        handed = await prefilled(both)
        other = {**BODY, "prompt": [*TOKENS[:-1], 7]}
        await refused(both, await both.ask_decode(both.decode_body(other, handed)), "another prompt")
        await both.settled()


@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake"])
@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        (setting(max_tokens=2), 500, "one token"),
        (without("max_tokens"), 500, "one token"),
        (setting(max_completion_tokens=5), 500, "one token"),
        (setting(min_tokens=2), 400, "min_tokens"),
        (setting(stream_options={"include_usage": True}), 400, "stream_options"),
        (setting(prompt=[TOKENS, TOKENS]), 500, "several prompts"),
        (setting(n=2), 500, "several answers"),
        (setting(kv_transfer_params={"do_remote_prefill": True}), 500, "sent to a prefill worker"),
        (setting(kv_transfer_params={"do_remote_decode": False}), 500, "a prefill without its decode"),
        (setting(kv_transfer_params={"do_remote_decode": 1}), 500, "a prefill without its decode"),
        (without("kv_transfer_params"), 500, "a prefill without its decode"),
    ],
)
async def test_vllms_prefill(connector: str, change: Change, status: int, says: str) -> None:
    async with pair(connector) as both:
        await refused(both, await both.ask_prefill(change(both.prefill_body(BODY))), says, status)
        await both.settled()


@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake"])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "a decode without its prefill"),
        ({}, "a decode without its prefill"),
        ({"do_remote_decode": True}, "sent to a decode worker"),
    ],
)
async def test_vllms_decode(connector: str, given: Any, says: str) -> None:
    async with pair(connector) as both:
        await refused(both, await both.ask_decode({**BODY, "kv_transfer_params": given}), says)
        await both.settled()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("transfer_id"), "without transfer_id"),
        (without("remote_engine_id"), "knows no engine"),
        (setting(remote_engine_id="x"), "knows no engine"),
        (without("remote_bootstrap_addr"), "no bootstrap server"),
        (setting(remote_bootstrap_addr="http://127.0.0.1:9"), "no bootstrap server"),
    ],
)
async def test_mooncakes_decode(change: Change, says: str) -> None:
    async with pair("mooncake") as both:
        await refused(both, await both.ask_decode(params(change)(both.decode_body(BODY))), says)
        await both.settled()


@pytest.mark.parametrize(
    "change",
    [without("ignore_eos"), setting(stop=["x"]), setting(stop_token_ids=[2]), setting(ignore_eos=False)],
)
async def test_mooncakes_prefill_must_end_by_length(change: Change) -> None:
    async with pair("mooncake", speedup=100.0) as both:
        asked = both.ask_prefill(change(both.prefill_body(BODY))), both.ask_decode(both.decode_body(BODY))
        (prefill, _), (decode, _) = await asyncio.gather(*asked)
        assert (prefill, decode) == (200, 500)
        assert "may never send" in (await both.violations())[0]
        await both.settled()


async def test_mooncakes_engine_is_the_rank_that_prefills() -> None:
    async with pair("mooncake", dp_size=2) as both:
        wrong = both.decode_body(BODY)
        wrong["kv_transfer_params"]["remote_engine_id"] = both.place.engine_ids[1]
        prefill = both.prefill.post("/v1/completions", both.prefill_body(BODY), X_data_parallel_rank="0")
        (status, _), answer = await asyncio.gather(prefill, both.ask_decode(wrong))
        assert status == 200
        await refused(both, answer, "is offered by engine")


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_host", "remote_port", "tp_size"])
@pytest.mark.parametrize("change", ["missing", "altered"])
async def test_nixl_push_must_know_the_prefill_worker(name: str, change: str) -> None:
    async with pair("nixl-push") as both:
        broken = params(without(name) if change == "missing" else setting(**{name: "other"}))(both.decode_body(BODY))
        await refused(both, await both.ask_decode(broken), "no prefill worker is at")
        await both.settled()


async def test_nixl_push_must_be_given_a_name() -> None:
    async with pair("nixl-push") as both:
        nameless = params(without("remote_request_id"))(both.decode_body(BODY))
        await refused(both, await both.ask_decode(nameless), "without remote_request_id")
        await both.settled()


async def test_nixl_push_tells_where_to_register() -> None:
    async with pair("nixl-push") as both:
        handed = await prefilled(both)
        assert both.place.identity(0).items() <= handed.items()
        assert handed["transfer_mode"] == "push"
        assert (await both.ask_decode(both.decode_body(BODY, handed)))[0] == 200  # one after the other works too
        await both.settled()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_nixl_push_needs_a_request_id(leg: str) -> None:
    async with pair("nixl-push") as both:
        both.request_id = ""
        await refused(both, await both.half(leg, BODY), "without X-Request-Id")


@pytest.mark.parametrize("connector", ["nixl-push", "mooncake", "sglang"])
async def test_halves_under_different_names_never_meet(connector: str) -> None:
    async with pair(connector, speedup=500.0) as both:
        prefill = asyncio.create_task(both.half("prefill", BODY))
        transfers = both.decode.worker.fleet.transfers
        await until(lambda: transfers.offers)
        both.request_id = "another"
        body = both.decode_body(BODY)
        other = setting(bootstrap_room=8) if connector == "sglang" else params(setting(transfer_id="another"))
        status, answer = await both.ask_decode(other(body))
        assert status == 500
        if connector == "sglang":
            assert answer["message"].startswith("Lost connection with prefill instance")
        await prefill
        assert any("was never offered" in text for text in await both.violations())
        await both.settled()


@pytest.mark.parametrize("connector", ["nixl-push", "mooncake", "sglang"])
async def test_halves_must_have_the_same_prompt(connector: str) -> None:
    async with pair(connector, speedup=50.0, lease_s=15.0) as both:
        other = {**BODY, "prompt": TOKENS[1:]}
        answers = await asyncio.gather(both.half("prefill", BODY), both.half("decode", other))
        assert answers[1][0] == 500
        assert "another prompt" in (await both.violations())[0]
        await both.settled()


@pytest.mark.parametrize("connector", ["nixl-push", "mooncake"])
async def test_a_name_is_for_one_pair(connector: str) -> None:
    async with pair(connector, lease_s=1e6) as both:
        assert (await both.half("prefill", BODY))[0] == 200
        await refused(both, await both.half("prefill", BODY), "used twice")
        assert (await both.half("decode", BODY))[0] == 200
        await both.settled()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    "change",
    [
        without("bootstrap_room"),
        setting(bootstrap_room="7"),
        setting(bootstrap_room=-1),
        setting(bootstrap_room=2**63),
        setting(bootstrap_room=True),
        setting(bootstrap_room=[7]),
        setting(prompt=[TOKENS, TOKENS], bootstrap_room=[7]),
        setting(prompt=[TOKENS, TOKENS], bootstrap_room=[7, None]),
    ],
)
async def test_sglangs_rooms(leg: str, change: Change) -> None:
    async with pair("sglang") as both:
        asked = both.ask_prefill if leg == "prefill" else both.ask_decode
        await refused(both, await asked(change(both.decode_body(BODY))), "bootstrap", 400)
        await both.settled()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    "change",
    [
        setting(bootstrap_port=9),
        setting(bootstrap_host="elsewhere"),
        setting(bootstrap_room=8),
        without("bootstrap_host"),
    ],
)
async def test_sglangs_halves_that_lose_each_other(leg: str, change: Change) -> None:
    async with pair("sglang", speedup=500.0) as both:
        changes = {"prefill": same, "decode": same, leg: change}
        prefill, decode = (changes[each](both.decode_body(BODY)) for each in ("prefill", "decode"))
        answers = await asyncio.gather(both.ask_prefill(prefill), both.ask_decode(decode))
        assert [status for status, _ in answers] == [500, 500]
        assert answers[1][1]["message"].startswith("Lost connection with prefill instance (bootstrap_addr: ")
        assert await both.violations()
        await both.settled()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_sglangs_answers_need_a_room_each(leg: str) -> None:
    async with pair("sglang") as both:
        asked = both.ask_prefill if leg == "prefill" else both.ask_decode
        await refused(both, await asked({**both.decode_body(BODY), "n": 2}), "several answers")
        await both.settled()


@pytest.mark.parametrize(("rank", "status"), [(None, 200), (1, 200), (0, 500), (2, 500)])
async def test_sglangs_decode_must_ask_the_rank_that_prefills(rank: int | None, status: int) -> None:
    async with pair("sglang", dp_size=2) as both:
        decode = {**both.decode_body(BODY), "disagg_prefill_dp_rank": rank}
        prefill = asyncio.create_task(both.half("prefill", BODY))
        assert (await both.ask_decode(decode))[0] == status
        assert len(await both.violations()) == (status == 500)
        prefill.cancel()
        await both.settled()


async def test_a_sequential_router_never_gets_sglangs_prefill() -> None:
    async with pair("sglang", speedup=500.0) as both:
        await refused(both, await both.half("prefill", BODY), "no decode came")
        await both.settled()


async def test_a_store_decode_that_nobody_prefilled_is_served_and_told_of() -> None:
    async with pair("store") as both:
        assert (await both.ask_decode(BODY))[0] == 200
        assert "nothing of its prompt" in (await both.violations())[0]
        assert (await both.ask_decode({**BODY, "prompt": TOKENS[:9]}))[0] == 200  # not a block
        assert len(await both.violations()) == 1
        await both.settled()
