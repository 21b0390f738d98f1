"""What is asked for most lies in a second segment soon after its holder has become busy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.asking import get
from tests.real.conftest import running
from tests.real.eventually import eventually
from tests.real.fleet import Router
from tests.real.pd.requests import telling
from tests.real.processes import ROOT
from tests.real.prompts import ids

from .busy import saturated
from .members import Lender, Master, Member, client_path, until_stored

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

BLOCKS = 16
TIMES = 12
"""Enough for a prefix of so many blocks to be counted as hot."""
MOUNTING = 30.0


@pytest.fixture(scope="module")
def lender(master: Master, members: list[Member], logs: Path) -> Iterator[Lender]:
    found, mounted = Lender(master, logs), len(master.segments())
    found.process.start()
    try:
        eventually(lambda: len(master.segments()), lambda segments: segments == mounted + 1, within=MOUNTING)
        yield found
    finally:
        found.process.stop()
    eventually(lambda: len(master.segments()), lambda segments: segments == mounted, within=MOUNTING)


@pytest.fixture(scope="module")
def copying(master: Master, lender: Lender, members: list[Member], logs: Path) -> Iterator[Router]:
    """Both workers are on one address here; that the other is on another host is stated."""
    a, b = members
    path = os.pathsep.join([str(ROOT), str(client_path(logs / "mooncake"))])
    store = f"{master.url},budget_ms=500,copy=200,rpc=127.0.0.1:{master.rpc_port}"
    more = ["--worker", f"{b.url},host=10.255.255.1", "--store", store]
    yield from running(Router("router-copies", [a], logs, *more, env={"PYTHONPATH": path}))


def copies(router: Router) -> dict[str, float]:
    text = get(f"{router.url}/metrics").body.decode()
    found = re.findall(r'^router_store_copies_total{outcome="(.*)"} (\S+)$', text, re.MULTILINE)
    return {outcome: float(number) for outcome, number in found}


def test_what_a_busy_host_holds_is_copied_to_another(
    copying: Router, master: Master, lender: Lender, a: Member, b: Member
) -> None:
    body = telling("ids", "copied") | {"prompt": ids("copied", BLOCKS * a.block)}
    assert copying.ask(body, b.worker_id).status == 200
    keys = a.keys(body["prompt"])
    held = until_stored(master, keys)
    missing = [key for key in keys if not lender.has(held[key])]
    assert missing, "the store spreads what it is given over all segments"
    for _ in range(TIMES):
        assert copying.ask(body, b.worker_id).status == 200
    assert copies(copying) == {"asked": 0, "failed": 0}, "nobody is busy"
    with saturated(a, copying):
        now = eventually(lambda: master.held(keys), lambda held: all(map(lender.has, held.values())), within=60.0)
    assert {len(now[key].owners) for key in missing} == {2}
    assert all(len(now[key].owners) == 1 for key in set(keys) - set(missing)), "that host is not busy"
    assert copies(copying) == {"asked": len(missing), "failed": 0}
