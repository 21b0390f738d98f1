"""What a person is told of a store, and when what the router would ask for is not what is there."""

from __future__ import annotations

import json
from typing import NoReturn, cast

import aiohttp
import pytest

from indexer.hashing import pack_tokens
from router.store_cli import status
from router.store_cli.errors import Away
from router.store_cli.peers import Master as Asked
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.store_master import Master

from .conftest import Run

TOKENS = pack_tokens(list(range(12)))


async def test_a_store_is_told_with_its_memory_and_keys(run: Run, master: Master) -> None:
    master.put(TOKENS, 3)
    master.counts |= {"master_evicted_key_count": 7, "master_successful_evictions_total": 1}
    ended = await run("status", "--store", master.url)
    assert (ended.status, ended.err) == (0, "")
    lines = [line.split() for line in ended.out.splitlines()]
    assert ["master", "up,", "leader,", "serving"] in lines
    assert ["memory", "6", "B", "of", "1.0", "MiB", "(0%)", "in", "1", "segment", "of", "1", "client"] in lines
    assert ["evicted", "7", "keys,", "0", "B,", "1", "time;", "0", "puts", "found", "no", "room"] in lines
    assert ["10.0.0.7:7", "h:1", "6", "B", "1.0", "MiB", "0%"] in lines
    assert ["tiny", "vllm", "6", "3", "2", "tp", "2", "pp", "1", "256", "bits"] in lines
    assert "MISMATCH" not in ended.out


async def test_an_empty_store(run: Run, master: Master) -> None:
    ended = await run("status", "--store", master.url)
    assert "No keys." in ended.out


async def test_a_layout_that_differs_is_told_loudly(run: Run, master: Master, worker: ScriptedWorker) -> None:
    master.put(TOKENS, 3)
    stated = f"{master.url},model=tiny"
    for arguments in ((stated,), (f"{master.url},model=other,tp=2",), (master.url, "--worker", worker.url)):
        ended = await run("status", "--store", *arguments)
        assert ended.status == 0
        assert ended.out.count("MISMATCH") == 1
    for arguments in ((f"{stated},tp=2",), (f"{master.url},tp=2", "--worker", worker.url)):
        ended = await run("status", "--store", *arguments)
        assert "The keys of tiny are named as expected." in ended.out
        assert "MISMATCH" not in ended.out


async def test_keys_of_sglang_are_held_against_what_sglang_would_write(run: Run, master: Master) -> None:
    digest = "ab" * 32
    master.there = {f"org-tiny_{digest}_0_{part}" for part in "kv"}
    agreeing = await run("status", "--store", f"{master.url},model=org/tiny")
    assert "named as expected" in agreeing.out
    differing = await run("status", "--store", f"{master.url},model=org/tiny,tp=2")
    assert "MISMATCH" in differing.out


async def test_for_machines(run: Run, master: Master) -> None:
    master.put(TOKENS, 3)
    found = json.loads((await run("status", "--json", "--store", f"{master.url},model=tiny")).out)
    assert found["health"]["role"] == "leader"
    assert found["counted"]["keys"] == 6
    assert found["segments"] == [{"name": "10.0.0.7:7", "endpoint": "h:1", "size": 1 << 20, "used": 6}]
    assert [(one["model"], one["tp"], one["blocks"]) for one in found["kept"]] == [("tiny", 2, 3)]
    assert [(one["model"], one["agrees"]) for one in found["named"]] == [("tiny", False)]


async def test_millions_of_keys_are_not_listed_unasked(run: Run, master: Master) -> None:
    master.put(TOKENS, 3)
    master.counts["master_key_count"] = status.MOST_KEYS + 1
    ended = await run("status", "--store", f"{master.url},model=tiny")
    assert "--list-all" in ended.out
    assert [master.listed] == [0]
    ended = await run("status", "--list-all", "--store", f"{master.url},model=tiny")
    assert [master.listed] == [1]
    assert "MISMATCH" in ended.out


class _Hanging:
    """A session in which nobody answers; notes how long it was to wait."""

    def __init__(self) -> None:
        self.limits: list[float | None] = []

    def request(self, *_: object, timeout: aiohttp.ClientTimeout, **__: object) -> NoReturn:
        self.limits.append(timeout.total)
        raise TimeoutError


async def test_a_list_of_many_keys_has_more_time() -> None:
    """A master takes seconds for half a million."""
    session = _Hanging()
    master = Asked(cast("aiohttp.ClientSession", session), "http://master:9003")
    for asked in (master.segments(), master.keys(0), master.keys(3_000_000)):
        with pytest.raises(Away):
            await asked
    assert session.limits == [10.0, 10.0, 310.0]


async def test_whoever_does_not_answer_is_named_in_one_sentence(run: Run, master: Master) -> None:
    away = await run("status", "--store", "http://127.0.0.1:1")
    assert (away.status, away.out, away.err.count("\n")) == (1, "", 1)
    assert "The store's master does not answer at http://127.0.0.1:1: Connection refused." in away.err
    another = await run("status", "--store", f"{master.url}/elsewhere")
    assert another.status == 1
    assert "404" in another.err
    nobody = await run("status", "--store", master.url, "--worker", "http://127.0.0.1:1")
    assert (nobody.status, nobody.out, nobody.err.count("\n")) == (1, "", 1)
    assert "The worker does not answer at http://127.0.0.1:1: Connection refused." in nobody.err


async def test_nonsense_is_no_answer(run: Run, master: Master) -> None:
    master.segments_text = "<html>"
    ended = await run("status", "--store", master.url)
    assert (ended.status, "answers /get_segments_detail with nonsense" in ended.err) == (1, True)


async def test_wrong_use(run: Run, master: Master) -> None:
    for arguments in (
        (),
        ("stauts", "--store", master.url),
        ("status",),
        ("status", "--store", "none"),
        ("status", "--store", f"{master.url},modle=x"),
        ("status", "--store", master.url, "--worker", "nowhere"),
        ("status", "--store", master.url, "--frob"),
        ("hot", "--store", master.url, "--router", "nowhere"),
        ("hot", "--store", master.url, "--router", "http://[::1"),
        ("hot", "--store", master.url, "--router", "http://a..b"),
    ):
        ended = await run(*arguments)
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1), arguments
        assert ended.err.startswith("kv-router store: ")
