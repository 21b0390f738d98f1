"""A worker dies without a word and comes back empty, on the same ports."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from .asking import Answer
from .eventually import eventually
from .fleet import Engine, Router
from .prompts import request

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

REQUESTS = 40


@pytest.fixture
def routers(local_router: Router, nats_router: Router) -> list[Router]:
    return [local_router, nats_router]


def test_others_take_over_and_it_starts_anew(routers: list[Router], vllm: Engine) -> None:
    for router in routers:
        router.until_known(vllm, request("ids", f"death {router}", tail="first"))
    try:
        assert_others_take_over(routers, vllm)
    finally:
        vllm.restart()
    eventually(lambda: [router.state(vllm) for router in routers], all_up_and_empty)
    for router in routers:
        assert_is_right_again(router, vllm)


def assert_others_take_over(routers: list[Router], victim: Engine) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask_for, routers[number % 2]) for number in range(REQUESTS)]
        # It holds their prefix; a report of what the other router has sent it may turn one away.
        eventually(lambda: victim.worker_id in {answer.result().worker for answer in answers if answer.done()})
        victim.process.kill()
    assert_all_answered(answers, victim)
    eventually(lambda: [router.state(victim)["up"] for router in routers], lambda ups: not any(ups))


def all_up_and_empty(states: list[dict[str, object]]) -> bool:
    return all(state["up"] and state["blocks"] == 0 for state in states)


def ask_for(router: Router) -> Answer:
    return router.ask(request("ids", f"death {router}"))


def assert_all_answered(answers: list[Future[Answer]], victim: Engine) -> None:
    found = [answer.result() for answer in answers]
    assert [answer for answer in found if answer.status != 200] == []
    assert found[-1].worker != victim.worker_id


def assert_is_right_again(router: Router, engine: Engine) -> None:
    body = request("ids", f"death {router}", tail="first")
    cold = router.ask(body, engine.worker_id)
    assert (cold.status, cold.predicted, cold.reported) == (200, 0, 0)
    router.until_known(engine, body)
