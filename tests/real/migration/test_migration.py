"""A vLLM dies within a stream, and another goes on: text and tokens are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.real.asking import get
from tests.real.fleet import Router
from tests.real.pd.halves import Weighted, total
from tests.real.pd.requests import directly, path_of
from tests.real.prompts import KINDS, Kind, request
from tests.router.migration.client import Seen, seen

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TOKENS = 200
BREAK_AFTER = 20
ATTEMPTS = 4
"""On two cores vLLM's HTTP server now and then gets no turn beside its spinning engine, and then sends all at once."""


def story(kind: Kind, ids: bool = True) -> dict[str, Any]:
    body = request(kind, "migration", stream=True, tail="the same")
    return body | {"max_tokens": TOKENS} | ({"return_token_ids": True} if ids else {})


Blow = Callable[[], None]


def at_all(engine: Weighted) -> Blow:
    return engine.process.kill


def at_engine_process(engine: Weighted) -> Blow:
    """Its HTTP server lives on for a moment, and says in the stream what happened."""
    group = str(engine.process.group)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        found = re.match(r"(\d+) \((.*)\) \S+ \d+ (\d+)", stat.read_text())
        if found and found[3] == group and found[2].startswith("VLLM::EngineCor"):
            return partial(os.kill, int(found[1]), signal.SIGKILL)
    raise AssertionError("no engine process")


def broken(router: Router, pair: list[Weighted], body: dict[str, Any], aim: Callable[[Weighted], Blow]) -> Seen:
    """What a client sees whose worker dies after some events."""
    blows = {engine.worker_id: aim(engine) for engine in pair}  # looking for a process takes longer than an answer may
    data = json.dumps(body).encode()
    asked = urllib.request.Request(router.url + path_of(body), data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        got = b"".join(answer.readline() for _ in range(2 * BREAK_AFTER))
        [victim] = [engine for engine in pair if engine.worker_id == answer.headers["x-router-worker"]]
        try:
            blows[victim.worker_id]()
            return seen(got + answer.read())
        finally:
            victim.restart()
            router.until_all_are_up()


def broken_in_time(router: Router, pair: list[Weighted], body: dict[str, Any], aim: Callable[[Weighted], Blow]) -> Seen:
    """Tries again only where the answer is whole without a migration: its worker had sent all of it before it died."""
    before = continued(router)
    for _ in range(ATTEMPTS):
        found = broken(router, pair, body, aim)
        if found.errors or not found.ends or continued(router) > before:
            return found
    raise AssertionError(f"{ATTEMPTS} times the worker had ended its stream before it died")


def continued(router: Router) -> float:
    return total(router.url, "router_migrations_total", outcome="continued")


@pytest.mark.parametrize(
    ("kind", "ids", "aim"),
    [*((kind, True, at_all) for kind in KINDS), ("chat", False, at_engine_process)],
)
def test_it_is_as_if_nothing_had_happened(
    migrating_router: Router, pair: list[Weighted], kind: Kind, ids: bool, aim: Callable[[Weighted], Blow]
) -> None:
    body = story(kind, ids)
    wanted = [seen(directly(engine, body).body) for engine in pair]
    assert wanted[0].text == wanted[1].text
    before = continued(migrating_router)
    found = broken_in_time(migrating_router, pair, body, aim)
    assert (found.text, found.tokens, found.prompt) == (wanted[0].text, wanted[0].tokens, wanted[0].prompt)
    assert (found.errors, found.ends, found.roles, found.reasons) == ([], 1, kind == "chat", ["length"])
    assert (found.usage, len(found.names)) == (wanted[0].usage, 1)
    assert continued(migrating_router) == before + 1
    assert get(f"{migrating_router.url}/ready").status == 200
