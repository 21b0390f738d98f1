"""A half dies without a word while requests run, and another of its role takes over: no request is lost, and none is
answered from KV that was left behind. With NIXL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests.real.asking import Answer
from tests.real.eventually import eventually
from tests.real.prompts import ids

from .halves import ROLES, Half, Role, Scene, Stage, total
from .requests import directly, telling

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

REQUESTS, AT_ONCE = 20, 6
TOKENS: dict[Role, tuple[int, int]] = {"prefill": (4000, 16), "decode": (500, 200)}
"""Of a prompt and its answer: the half that is to die must be at work when it does."""


class Asked(NamedTuple):
    bodies: list[dict[str, Any]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def asked(stage: Stage) -> dict[Role, Asked]:
    """All before the first death: later there is no room for the plain engine."""
    plain = stage.plain()
    bodies = {role: [lasting(role, number) for number in range(REQUESTS)] for role in ROLES}
    return {role: Asked(bodies[role], [directly(plain, body).token_ids for body in bodies[role]]) for role in ROLES}


def test_prefill_worker_dies(stage: Stage, asked: dict[Role, Asked]) -> None:
    scene = stage.scene("nixl", prefills=2)
    assert_none_is_lost(scene, asked["prefill"], victim=scene.prefills[0])


def test_decode_worker_dies(stage: Stage, asked: dict[Role, Asked]) -> None:
    scene = stage.scene("nixl", decodes=2)
    assert_none_is_lost(scene, asked["decode"], victim=scene.decodes[0])


def lasting(role: Role, number: int) -> dict[str, Any]:
    """Keeps that half busy for a moment."""
    (prompt, answer), topic = TOKENS[role], f"{role} dies {number}"
    return telling("ids", topic) | {"prompt": ids(topic, prompt), "max_tokens": answer}


def assert_none_is_lost(scene: Scene, asked: Asked, victim: Half) -> None:
    url, name = scene.router.url, victim.worker_id
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [pool.submit(scene.router.ask, body) for body in asked.bodies]
        eventually(lambda: name in {half for answer in answers if answer.done() for half in halves_of(answer.result())})
        eventually(lambda: stopped_at_work(url, victim))
        victim.process.kill()
    found = [answer.result() for answer in answers]
    assert [answer for answer in found if answer.status != 200] == []
    assert [answer.token_ids for answer in found] == asked.expected
    assert total(url, "router_retries_total", worker=name) > 0
    assert name not in halves_of(found[-1])


def stopped_at_work(url: str, victim: Half) -> bool:
    """Whether it stands still within a request. What it had answered before passes the router between two looks."""
    victim.process.freeze()
    looks = [total(url, "router_load_requests", worker=victim.worker_id) for _ in range(3)]
    if not all(looks):
        victim.process.thaw()
    return all(looks)


def halves_of(answer: Answer) -> tuple[str | None, str | None]:
    return answer.headers.get("x-router-prefill-worker"), answer.worker
