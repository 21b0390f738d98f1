"""What clients ask for most is told with where it lies, and nothing of what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.store import VllmLayout
from indexer.hashing import pack_tokens
from router.store.hot_page import Hot
from router.store.spec import StoreSpec
from tests.certificates import Authority
from tests.fakes import http_engine
from tests.fakes.http_engine import HttpEngine
from tests.fakes.raw_client import RawClient, post
from tests.fakes.scripted_worker import BLOCK_SIZE, ScriptedWorker
from tests.fakes.store_master import Master
from tests.router.proxy.running import RunningRouter, running
from tests.router.security.files import write_keys

from .conftest import Run

TOKENS = [7_000 + number for number in range(4 * BLOCK_SIZE + 1)]


def with_store(worker: ScriptedWorker, master: Master) -> Any:
    master.layout = VllmLayout(model="tiny", block_size=BLOCK_SIZE)
    return running(worker, router_mode="kv", store=StoreSpec(url=master.url, budget_ms=10_000.0))


async def ask(client: RawClient, tokens: list[int]) -> None:
    body = json.dumps({"model": "tiny", "prompt": tokens}).encode()
    assert (await client.ask(post("/v1/completions", body))).status == 200


async def test_a_prefix_that_many_ask_for(run: Run, master: Master, worker: ScriptedWorker) -> None:
    async with with_store(worker, master) as router, router.client() as client:
        master.put(pack_tokens(TOKENS), 4)
        for number in range(6):
            await ask(client, TOKENS[:-1] + [number] * BLOCK_SIZE)
        arguments = ("hot", "--store", master.url, "--router", router.url)
        found = json.loads((await run(*arguments, "--json")).out)
        [prefix] = found["prefixes"]
        assert (prefix["model"], prefix["tokens"], prefix["asked"]) == ("tiny", 4 * BLOCK_SIZE, 4)
        assert (prefix["on_gpu"], prefix["below_gpu"]) == (["a#0"], []), "by assumption: it was sent there"
        assert (prefix["stored"], prefix["hosts"]) == (True, ["10.0.0.7"])
        row = (await run(*arguments)).out.splitlines()[1]
        assert row.split() == f"4 {4 * BLOCK_SIZE} tiny {prefix['hash']} a#0 - yes, 10.0.0.7".split()
        assert (await _page(router)).keys() == {*Hot.__struct_fields__}, "no token, no text"
        master.there.clear()
        [gone] = json.loads((await run(*arguments, "--json")).out)["prefixes"]
        assert (gone["stored"], gone["hosts"]) == (False, [])


async def test_nothing_is_hot_at_first(run: Run, master: Master, worker: ScriptedWorker) -> None:
    async with with_store(worker, master) as router, router.client() as client:
        await ask(client, TOKENS)
        ended = await run("hot", "--store", master.url, "--router", router.url)
        assert (ended.status, ended.out) == (0, "No prefix was asked for twice of late.\n")


async def test_a_router_without_a_store_or_none(run: Run, master: Master, worker: ScriptedWorker) -> None:
    async with running(worker, router_mode="kv") as router:
        ended = await run("hot", "--store", master.url, "--router", router.url)
        assert (ended.status, "without --store" in ended.err) == (1, True)
    async with http_engine.running(HttpEngine({})) as engine:
        ended = await run("hot", "--store", master.url, "--router", engine.url)
    assert (ended.status, "a router without --store is there, or none" in ended.err) == (1, True)
    ended = await run("hot", "--store", master.url, "--router", "http://127.0.0.1:1")
    assert (ended.status, "The router does not answer" in ended.err) == (1, True)


@pytest.mark.parametrize(
    "body",
    [b"<html>", b'{"half_life_seconds":1,"models":[{"model":"\xff"}]}', b'{"x":' + b"[" * 10_000],
    ids=["", "text", "deep"],
)
async def test_nonsense_is_no_answer(run: Run, master: Master, body: bytes) -> None:
    async with http_engine.running(HttpEngine({"/router/hot": (200, body)})) as other:
        ended = await run("hot", "--store", master.url, "--router", other.url)
    assert (ended.status, "answers /router/hot with nonsense" in ended.err) == (1, True)


async def test_a_router_with_keys_tells_admins_only(
    run: Run, master: Master, worker: ScriptedWorker, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path, {"name": "one", "key": "kvr-one"}, {"name": "ops", "key": "kvr-ops", "admin": True})
    store = StoreSpec(url=master.url, budget_ms=10_000.0)
    async with running(worker, router_mode="kv", store=store, api_keys=keys) as router:
        arguments = ["hot", "--store", master.url, "--router", router.url]
        for key, status in ((None, 1), ("kvr-one", 1), ("kvr-ops", 0)):
            file = tmp_path / "key"
            file.write_text(key or "")
            ended = await run(*arguments, *(["--key-file", str(file)] if key else []))
            assert (ended.status, "--key-file" in ended.err) == (status, bool(status))
    assert (await run(*arguments, "--key-file", str(tmp_path / "nowhere"))).status == 2


async def test_a_router_that_speaks_tls(run: Run, master: Master, worker: ScriptedWorker, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    pair = ca.pair("127.0.0.1")
    store = StoreSpec(url=master.url, budget_ms=10_000.0)
    async with running(worker, router_mode="kv", store=store, tls_cert=pair.cert, tls_key=pair.key) as router:
        arguments = ("hot", "--store", master.url, "--router", f"https://127.0.0.1:{router.port}")
        said = (await run(*arguments)).err
        assert "certificate is not trusted (unable to get local issuer certificate); see --ca" in said
        assert (await run(*arguments, "--ca", ca.file)).status == 0
    assert (await run(*arguments, "--ca", str(tmp_path / "nowhere"))).status == 2


async def _page(router: RunningRouter) -> dict[str, Any]:
    """What it says of the hottest prefix."""
    async with router.client() as client:
        got = await client.ask(b"GET /router/hot HTTP/1.1\r\nhost: x\r\n\r\n")
        assert got.status == 200
        hottest: dict[str, Any] = json.loads(got.body)["models"][0]["prefixes"][0]
        return hottest
