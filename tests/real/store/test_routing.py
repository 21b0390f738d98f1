"""A router that knows what lies in the store: a prompt goes where it is loaded soonest, and nothing depends on the
store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from indexer.types import Namespace
from tests.real.asking import Answer, get
from tests.real.conftest import running
from tests.real.eventually import eventually
from tests.real.fleet import Router
from tests.real.pd.requests import telling
from tests.real.prompts import ids

from .busy import saturated
from .members import Master, Member, until_stored

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

TOKENS = 2000
"""Not a multiple of a block: engines compute the last token themselves, and with it the block that it would end."""
HALF = 1024
SALT = "tenant"
REMOUNTING = 30.0


def members_known(master: Master) -> int:
    """A master that has just started answers that its service is not active yet."""
    try:
        return len(master.segments())
    except ValueError:
        return 0


def prompt(topic: str, salt: str | None = None) -> dict[str, Any]:
    body = telling("ids", topic) | {"prompt": ids(topic, TOKENS)}
    return body | ({"cache_salt": salt} if salt else {})


def from_store(answer: Answer) -> int:
    """Tokens that the router expected beyond the worker's own."""
    return int(answer.headers["x-router-store-tokens"])


def stored_by(worker: Member, master: Master, router: Router, body: dict[str, Any]) -> Answer:
    """Computed by one worker only, and all of it in the store."""
    answer = router.ask(body, worker.worker_id)
    assert (answer.status, answer.worker, answer.reported) == (200, worker.worker_id, 0)
    until_stored(master, worker.keys(body["prompt"], Namespace(cache_salt=body.get("cache_salt"))))
    return answer


@pytest.mark.parametrize("salt", [None, SALT], ids=["plain", "salted"])
def test_what_a_busy_worker_computed_is_loaded_by_another(
    router: Router, master: Master, a: Member, b: Member, salt: str | None
) -> None:
    body = prompt(f"busy {salt}", salt)
    computed = stored_by(a, master, router, body)
    loaded = b.loaded()
    with saturated(a, router):
        answer = router.ask(body)
    assert (answer.status, answer.worker) == (200, b.worker_id)
    assert (answer.predicted, from_store(answer)) == (0, TOKENS // b.block * b.block)
    assert answer.reported == from_store(answer) == b.loaded() - loaded
    assert answer.token_ids == computed.token_ids


def test_own_blocks_come_first(router: Router, master: Master, a: Member, b: Member) -> None:
    """The store counts only beyond them: nothing is counted twice."""
    body = prompt("own first")
    computed = stored_by(a, master, router, body)
    router.until_known(b, body | {"prompt": body["prompt"][: HALF + 5]}, at_least=HALF)
    loaded = b.loaded()
    answer = router.ask(body, b.worker_id)
    assert answer.predicted + from_store(answer) == answer.reported == TOKENS // b.block * b.block
    assert (answer.predicted, from_store(answer)) == (HALF, b.loaded() - loaded)
    assert answer.token_ids == computed.token_ids


def test_idle_worker_that_computed_it_is_kept(router: Router, master: Master, a: Member) -> None:
    body = prompt("kept")
    stored_by(a, master, router, body)
    answer = router.until_known(a, body, at_least=HALF)
    assert from_store(answer) == 0
    assert router.ask(body).worker == a.worker_id


def test_worker_that_opts_out_is_not_credited(router: Router, master: Master, a: Member, b: Member, logs: Path) -> None:
    body = prompt("opted out")
    stored_by(a, master, router, body)
    more = ["--worker", f"{b.url},store=false", "--store", f"{master.url},budget_ms=500"]
    for other in running(Router("router-opted-out", [a], logs, *more)):
        assert from_store(other.ask(body, b.worker_id)) == 0


def test_masters_death_fails_nothing(router: Router, master: Master, a: Member, b: Member) -> None:
    """vLLM itself waits about 5 s for the store then, with each request."""
    body = prompt("death")
    computed = stored_by(a, master, router, body)
    master.process.kill()
    answers = [router.ask(prompt(f"no master {number}")) for number in range(3)]
    assert {answer.status for answer in answers} == {200}
    gone = eventually(lambda: router.ask(body, b.worker_id), lambda answer: from_store(answer) == 0)
    assert (gone.status, gone.token_ids) == (200, computed.token_ids)
    own = router.until_known(a, body, at_least=HALF)
    assert own.token_ids == computed.token_ids
    assert get(f"{router.url}/ready").status == 200
    master.start()
    eventually(lambda: members_known(master), lambda members: members == 2, within=REMOUNTING)
    answer = eventually(lambda: loaded_by_other(a, b, master, router), from_store, within=REMOUNTING)
    assert answer.reported == from_store(answer) == TOKENS // b.block * b.block


def loaded_by_other(one: Member, other: Member, master: Master, router: Router) -> Answer:
    """Of a prompt that is new each time."""
    body = prompt(f"back {time.monotonic()}")
    stored_by(one, master, router, body)
    return router.ask(body, other.worker_id)
