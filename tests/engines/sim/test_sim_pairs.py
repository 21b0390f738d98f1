"""Prefill and decode on two simulated workers: the right pair works, whatever ends it leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from engines.sim.timing import StepTiming
from tests.engines.sim.fleets import client, events
from tests.engines.sim.pairs import CHAT, IDLE, PAIRS, TEXT, TOGETHER, TOKENS, Pair, pair
from tests.fakes.waiting import until

SLOW = StepTiming(base_s=3600.0)
ALL = (*PAIRS, "store")
CACHED = {"nixl": 0, "nixl-push": 40, "mooncake": 40, "sglang": 0, "store": 32}
"""What a decode worker says of a prompt of 40 tokens that neither worker had cached."""
MESSAGES = [{"role": "user", "content": "a question that fills more than one block"}]


def counted(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def plain_text(connector: str, body: dict[str, Any]) -> str:
    async with client(flavour="sglang" if connector == "sglang" else "vllm") as alone:
        return str((await alone.complete(**body))["choices"][0]["text"])


@pytest.mark.parametrize("connector", ALL)
async def test_a_pair_answers_what_one_worker_does(connector: str) -> None:
    body = {"prompt": TOKENS, "max_tokens": 6}
    async with pair(connector) as both:
        first, answer = await both.both(body)
        assert answer["choices"][0]["text"] == await plain_text(connector, body)
        assert first["usage"]["completion_tokens"] == 1
        assert (answer["usage"]["completion_tokens"], counted(answer)) == (6, CACHED[connector])
        assert "kv_transfer_params" not in answer or answer["kv_transfer_params"] is None
        moved = 32 if connector == "store" else 40
        assert await both.state() == {**IDLE, "violations": [], "transferred_tokens": moved}
        assert both.decode.scheduler.counters.prefill_tokens == (8 if connector == "store" else 1)
        await both.settled()


@pytest.mark.parametrize("connector", ALL)
async def test_a_streamed_chat(connector: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    async with pair(connector) as both:
        if connector in TOGETHER:
            prefill = {name: value for name, value in body.items() if not name.startswith("stream")}
            asked = both.ask_prefill(both.prefill_body(prefill), CHAT)
            (status, _), (decoded, text) = await asyncio.gather(asked, both.ask_decode(both.decode_body(body), CHAT))
            assert (status, decoded) == (200, 200)
        else:
            plain = {"messages": MESSAGES, "max_tokens": 6}
            _, answer = await both.ask_prefill(both.prefill_body(plain), CHAT)
            _, text = await both.ask_decode(both.decode_body(body, answer.get("kv_transfer_params")), CHAT)
        *_, usage, done = events(text.encode())
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] == 6
        assert await both.violations() == []
        await both.settled()


@pytest.mark.parametrize("connector", TOGETHER)
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_either_half_may_come_first(connector: str, first: str) -> None:
    body = {"prompt": TOKENS, "max_tokens": 3}
    async with pair(connector) as both:
        halves = {
            "prefill": both.ask_prefill(both.prefill_body(body)),
            "decode": both.ask_decode(both.decode_body(body)),
        }
        early = asyncio.create_task(halves.pop(first))
        transfers = both.decode.worker.fleet.transfers
        await until(lambda: transfers.offers or transfers.wants)
        (late,) = halves.values()
        assert [status for status, _ in await asyncio.gather(early, late)] == [200, 200]
        assert await both.violations() == []
        await both.settled()


@pytest.mark.parametrize("connector", ALL)
async def test_decode_takes_only_what_it_lacks(connector: str) -> None:
    async with pair(connector) as both:
        await both.both({"prompt": TOKENS[:33], "max_tokens": 1})
        _, answer = await both.both({"prompt": TOKENS, "max_tokens": 2})
        moved = (await both.state())["transferred_tokens"]
        assert moved == (32 if connector == "store" else 33 + 8)  # whole blocks, of which it has those two
        # The prefill worker had two blocks; so had the decode worker.
        assert counted(answer) == {"nixl": 32, "sglang": 32, "store": 32}.get(connector, 40)
        await both.settled()


async def test_the_source_of_prompt_tokens_is_counted() -> None:
    async with pair("nixl") as both:
        await both.both({"prompt": TOKENS, "max_tokens": 2})
        for worker, source in ((both.decode, "external_kv_transfer"), (both.prefill, "local_compute")):
            text = await worker.get("/metrics")
            line = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="%s"} 40.0'
            assert line % source in text


@pytest.mark.parametrize("connector", PAIRS)
async def test_a_transfer_takes_time(connector: str) -> None:
    """A second for 40 tokens and another of base, simulated."""
    slow = {"transfer_gb_s": 40 * 131_072 / 1e9, "transfer_base_s": 1.0, "speedup": 20.0, "lease_s": 1e6}
    async with pair(connector, **slow) as both:
        await both.both({"prompt": TOKENS, "max_tokens": 1})
        assert both.decode.scheduler.counters.first_token_seconds >= 2.0


async def test_pushing_hides_behind_prefill() -> None:
    """5 s of prefill cover 2.5 s of sending: what is left when it is done is the base time."""
    slow = {"transfer_gb_s": 40 * 131_072 / 2.5e9, "transfer_base_s": 3600.0, "timing": StepTiming(base_s=5.0)}
    async with pair("mooncake", speedup=20.0, **slow) as both:
        transfers, body = both.decode.worker.fleet.transfers, {"prompt": TOKENS, "max_tokens": 1}
        decode = asyncio.create_task(both.half("decode", body))
        await until(lambda: any(want.missing for want in transfers.wants.values()))
        prefill = asyncio.create_task(both.half("prefill", body))
        await until(lambda: any(offer.finished for offer in transfers.offers.values()))
        (offer,), (want,) = transfers.offers.values(), transfers.wants.values()
        assert offer.finished is not None
        assert isinstance(want.timer, asyncio.TimerHandle)
        arrives = transfers.now + 20.0 * (want.timer.when() - asyncio.get_running_loop().time())
        assert arrives - offer.finished == pytest.approx(3600.0, abs=2.0)
        decode.cancel()
        assert (await prefill)[0] == 200
        await both.settled()


@pytest.mark.parametrize("connector", ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_transfer_that_fails(connector: str, stream: bool) -> None:
    body = {"prompt": TOKENS, "max_tokens": 3}
    async with pair(connector) as both:
        assert (await both.decode.post("/sim/fault", {"kind": "transfer_fails"}))[0] == 200
        if connector in TOGETHER:
            prefill = asyncio.create_task(both.ask_prefill(both.prefill_body(body)))
            params = None
        else:
            _, answer = await both.ask_prefill(both.prefill_body(body))
            params = answer.get("kv_transfer_params")
        status, answer = await both.ask_decode({**both.decode_body(body, params), "stream": stream})
        if connector in TOGETHER:
            assert (await prefill)[0] == 200
        if stream:
            told, done = events(answer.encode())
            assert (status, done) == (200, "[DONE]")
            answer = told
        else:
            assert status == 500
        error = answer if connector == "sglang" and not stream else answer["error"]  # SGLang names it in streams only
        assert error["code"] == 500
        assert error["message"].startswith("Lost connection" if connector == "sglang" else "Internal server error")
        assert await both.violations() == []
        await both.settled()
        await both.both(body)  # the next one is well


@pytest.mark.parametrize("connector", ALL)
async def test_a_transfer_that_hangs_ends_with_its_client(connector: str) -> None:
    body = {"prompt": TOKENS, "max_tokens": 3}
    async with pair(connector) as both:
        await both.decode.post("/sim/fault", {"kind": "transfer_hangs"})
        asking = asyncio.create_task(both.both(body))
        await until(lambda: both.decode.scheduler.loading)
        if connector != "store":
            await until(lambda: both.prefill.scheduler.kept)
        asking.cancel()
        await both.settled()


async def test_what_hangs_is_let_go_at_the_end_of_its_lease() -> None:
    async with pair("mooncake", lease_s=30.0, speedup=100.0) as both:
        await both.decode.post("/sim/fault", {"kind": "transfer_hangs"})
        asking = asyncio.create_task(both.both({"prompt": TOKENS, "max_tokens": 3}))
        await until(lambda: both.decode.scheduler.loading)
        await until(lambda: not both.prefill.scheduler.kept and not both.decode.worker.fleet.transfers.offers)
        assert both.prefill.scheduler.cache.usage == 0
        asking.cancel()
        await both.settled()


@pytest.mark.parametrize("connector", TOGETHER)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_half_whose_client_leaves_before_the_other_came(connector: str, leg: str) -> None:
    body = {"prompt": TOKENS, "max_tokens": 3}
    async with pair(connector, timing=SLOW) as both:
        half = (
            both.ask_prefill(both.prefill_body(body)) if leg == "prefill" else both.ask_decode(both.decode_body(body))
        )
        asking = asyncio.create_task(half)
        transfers = both.decode.worker.fleet.transfers
        await until(lambda: transfers.offers or transfers.wants)
        asking.cancel()
        await both.settled()
        assert await both.violations() == []


@pytest.mark.parametrize("connector", TOGETHER)
async def test_both_leave_in_the_middle_of_prefill(connector: str) -> None:
    async with pair(connector, timing=SLOW) as both:
        asking = asyncio.create_task(both.both({"prompt": TOKENS, "max_tokens": 3}))
        await until(lambda: both.prefill.scheduler.cache.usage and both.decode.scheduler.loading)
        asking.cancel()
        await both.settled()


@pytest.mark.parametrize("connector", PAIRS)
async def test_leaving_in_the_middle_of_decode(connector: str) -> None:
    body = {"prompt": TOKENS, "max_tokens": 2000}
    async with pair(connector) as both:
        await both.both({"prompt": TOKENS[:20], "max_tokens": 1})
        both.decode.worker.slow_down(1e9)
        asking = asyncio.create_task(both.both(body))
        await until(lambda: both.decode.scheduler.running)
        assert (await both.state())["kept"] == 0
        asking.cancel()
        await both.settled()


@pytest.mark.parametrize("connector", ["nixl", "nixl-push", "mooncake"])
async def test_kv_that_nobody_takes_is_let_go_when_its_lease_is_over(connector: str) -> None:
    async with pair(connector, speedup=1000.0) as both:
        await both.ask_prefill(both.prefill_body({"prompt": TOKENS}))
        await both.settled()
        assert await both.violations() == []


async def test_a_streamed_prefill_answers_no_parameters_and_keeps_its_kv() -> None:
    async with pair("nixl") as both:
        body = both.prefill_body({"prompt": TOKENS})
        status, text = await both.ask_prefill({**body, "stream": True})
        assert status == 200
        assert "remote_block_ids" not in text
        state = await both.state()
        assert (state["offered"], state["kept"], len(state["violations"])) == (1, 1, 1)


@pytest.mark.parametrize("connector", PAIRS)
@pytest.mark.parametrize("kind", ["error500", "drop_before_first_byte"])
async def test_a_prefill_that_fails_leaves_its_decode_waiting_until_it_gives_up(connector: str, kind: str) -> None:
    body = {"prompt": TOKENS, "max_tokens": 3}
    async with pair(connector, speedup=500.0) as both:
        await both.prefill.post("/sim/fault", {"kind": kind})
        asked = both.ask_prefill(both.prefill_body(body))
        if connector == "nixl":
            await fails(asked, kind)
        else:
            _, (status, _) = await asyncio.gather(fails(asked, kind), both.ask_decode(both.decode_body(body)))
            assert status == 500
            assert "was never offered" in (await both.violations())[0]
        await both.settled()


@pytest.mark.parametrize("connector", TOGETHER)
async def test_so_does_one_whose_client_leaves_while_it_computes(connector: str) -> None:
    body = {"prompt": TOKENS, "max_tokens": 3}
    async with pair(connector, timing=SLOW) as both:
        transfers = both.decode.worker.fleet.transfers
        prefill, decode = (asyncio.create_task(both.half(leg, body)) for leg in ("prefill", "decode"))
        await until(lambda: both.prefill.scheduler.cache.usage and both.decode.scheduler.loading)
        prefill.cancel()
        await until(lambda: not transfers.offers)
        (want,) = transfers.wants.values()
        assert isinstance(want.timer, asyncio.TimerHandle)
        assert not want.timer.cancelled()
        transfers._nobody_came(want)  # as when its time is over
        assert (await decode)[0] == 500
        assert "was given up by its prefill" in (await both.violations())[0]
        await both.settled()


async def fails(asked: Any, kind: str) -> None:
    if kind == "error500":
        assert (await asked)[0] == 500
    else:
        with pytest.raises(aiohttp.ClientConnectionError):
            await asked


async def test_workers_that_do_both_serve_alone_and_in_pairs() -> None:
    async with pair("nixl", roles={}) as both:
        await both.prefill.complete(TOKENS, 2)
        await both.both({"prompt": TOKENS[1:], "max_tokens": 2})
        assert await both.violations() == []
        await both.settled()


async def test_rooms_lead_to_ranks() -> None:
    async with pair("sglang", dp_size=4) as both:
        await both.both({"prompt": TOKENS, "max_tokens": 2})
        done = [rank.scheduler.counters.finished_requests for rank in both.prefill.worker.ranks]
        assert done == [0, 0, 0, 1]
        assert await both.violations() == []


@pytest.mark.parametrize("rooms", [[5, 9], 5])
async def test_a_batch_has_a_room_for_each_prompt(rooms: Any) -> None:
    async with pair("sglang") as both:
        body: dict[str, Any] = {"prompt": [TOKENS, TOKENS[:20]], "max_tokens": 3}
        body |= both.bootstrap() | {"bootstrap_room": rooms}
        if isinstance(rooms, list):
            body |= {"bootstrap_host": ["127.0.0.1"] * 2, "bootstrap_port": [both.place.bootstrap_port] * 2}
        answers = await asyncio.gather(both.ask_prefill(body), both.ask_decode(body))
        assert [status for status, _ in answers] == [200, 200]
        assert len(answers[1][1]["choices"]) == 2
        assert await both.violations() == []
        await both.settled()


async def test_bootstrap_servers_tell_engines_by_rank() -> None:
    async with pair("mooncake", dp_size=2) as both, aiohttp.ClientSession() as session:
        async with session.get(both.place.bootstrap_url + "/query") as response:
            page = await response.json()
        assert [page[rank]["engine_id"] for rank in ("0", "1")] == list(both.place.engine_ids)
        assert page["0"]["worker_addr"]["0"]["0"].startswith("tcp://127.0.0.1:")
        assert both.fleet.bootstraps == {both.prefill.url: both.place.bootstrap_url}


async def test_sglang_tells_its_role() -> None:
    async with pair("sglang") as both:
        for worker, role in ((both.prefill, "prefill"), (both.decode, "decode")):
            info = await worker.get("/server_info")
            assert info["disaggregation_mode"] == role
            assert info["disaggregation_transfer_backend"] == "mooncake"
        assert (await both.prefill.get("/server_info"))["disaggregation_bootstrap_port"] == both.place.bootstrap_port


async def test_everything_at_once_leaves_nothing() -> None:
    async def one(both: Pair, number: int) -> None:
        body = {"prompt": [*TOKENS, number], "max_tokens": 5}
        _, answer = await both.prefill.post(TEXT, both.prefill_body(body))
        status, _ = await both.decode.post(TEXT, both.decode_body(body, answer["kv_transfer_params"]))
        assert status == 200

    async with pair("nixl", max_num_seqs=4, cache_tokens=40 * 16) as both:
        await asyncio.gather(*(one(both, number) for number in range(40)))
        assert await both.violations() == []
        await both.settled()
