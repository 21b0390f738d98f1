"""Two arms of live traffic in front of a simulated fleet, and the report on them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from router.ab.cli import main
from tests.e2e.children import PATIENCE, Child, Router, Sim

pytestmark = pytest.mark.slow

SESSIONS, TURNS = 12, 4


async def converse(client: aiohttp.ClientSession, session: int) -> list[str]:
    """Turns that grow out of each other; returns the arm of each."""
    told, arms = list(range(1000 * session, 1000 * session + 600)), []
    for turn in range(TURNS):
        body = {
            "model": "sim",
            "prompt": told,
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with client.post("/v1/completions", json=body, headers={"x-session-id": f"s{session}"}) as answer:
            assert answer.status == 200
            arms.append(answer.headers["x-router-arm"])
            await answer.read()
        told = [*told, *range(500_000 + turn, 500_200 + turn)]
    return arms


async def traffic(url: str) -> list[list[str]]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(PATIENCE)) as client:
        return list(await asyncio.gather(*(converse(client, session) for session in range(SESSIONS))))


@pytest.mark.parametrize("processes", ["1", "2"])
def test_two_arms_and_their_report(
    fleet: Sim, logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: str
) -> None:
    html = tmp_path / "live.html"
    flags = ["--ab", "kv:50,round-robin:50", "--ab-sticky", "X-Session-Id", "--processes", processes]
    with Router(fleet.urls, *flags, log=logs) as router:
        sessions = asyncio.run(traffic(router.url))
        assert all(len(set(arms)) == 1 for arms in sessions)
        counted = Counter(arm for arms in sessions for arm in arms)
        assert counted.keys() == {"kv", "round-robin"}
        for arm, count in counted.items():
            assert router.metric("router_ab_requests_total", arm=arm, end="complete") == count
            assert router.metric("router_ab_first_byte_seconds_count", arm=arm) == count
            assert router.metric("router_ab_reported_cached_tokens_total", arm=arm) > 0
        assert main(["report", router.url, "--html", str(html)]) == 0
    said = capsys.readouterr().out
    assert f"{SESSIONS * TURNS} requests since the start" in said
    assert "warning kv: fewer than 100 answers" in said
    assert "cached prompt tokens %" in html.read_text("utf-8")


@pytest.mark.parametrize("spec", ["kv:90", "kv:90,best:10", "kv/none-such:1,kv:1"])
def test_wrong_arms_are_told_in_one_sentence(logs: Path, spec: str) -> None:
    with Child("router", "--worker", "http://127.0.0.1:1", "--ab", spec, log=logs) as router:
        assert router.ended() == 2
        (sentence,) = router.log.splitlines()
    assert sentence.startswith("kv-router: --ab: ")
