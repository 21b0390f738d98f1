"""What cannot be served is answered as OpenAI would answer it, whichever worker it would have gone to."""

from __future__ import annotations

import pytest

from .asking import Answer, ask
from .fleet import LONGEST_PROMPT, Engine, Router
from .prompts import VOCABULARY, filler, request

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def assert_error(answer: Answer, status: int) -> None:
    assert answer.status == status, answer
    body = answer.json()
    error = body.get("error", body)  # SGLang's own errors are flat, and OpenAI's client takes both
    assert error["message"]
    assert error["type"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "tiny", "prompt": "x"', b"[]", b"null", b"\xff"])
def test_what_is_no_json_object(local_router: Router, path: str, body: bytes) -> None:
    assert_error(ask(local_router.url + path, body), 400)


def test_prompt_longer_than_the_model_takes(router: Router, engines: list[Engine]) -> None:
    for engine in engines:
        assert_error(router.ask(filler("too long", LONGEST_PROMPT + 100), engine.worker_id), 400)


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**31, 2**40])
def test_token_that_the_model_does_not_have(local_router: Router, engines: list[Engine], token: int) -> None:
    """SGLang dies of it, so it must not get there; least of all by retries, one worker after the other."""
    local_router.until_all_are_up()
    for engine in engines:
        for prompt in ({"prompt": [7, token]}, {"messages": [], "input_ids": [7, token]}):
            answer = local_router.ask({"model": "tiny", **prompt, "max_tokens": 1}, engine.worker_id)
            if answer.status != 400:
                engine.restart()  # for the tests that follow
            assert_error(answer, 400)


@pytest.mark.parametrize("prompt", [["a", 1], {"a": 1}, 7])
def test_prompt_of_the_wrong_kind(router: Router, engines: list[Engine], prompt: object) -> None:
    for engine in engines:
        assert_error(router.ask({"model": "tiny", "prompt": prompt, "max_tokens": 1}, engine.worker_id), 400)


def test_unknown_model(router: Router) -> None:
    for kind in ("ids", "chat"):
        assert_error(router.ask(request(kind, "unknown model") | {"model": "nobody"}), 404)


def test_serves_on_after_all_that(router: Router, engines: list[Engine]) -> None:
    for engine in engines:
        assert router.state(engine)["up"]
        assert router.ask(request("text", "afterwards"), engine.worker_id).status == 200
