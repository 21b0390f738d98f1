"""Engines' own paths: SGLang's /generate and vLLM's /inference/v1/generate find what is cached, by whatever path it
came, and their answers are the engine's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .asking import Answer, ask
from .eventually import eventually
from .fleet import Engine, Router
from .prompts import PREFIX_LEAST, TOPIC_TOKENS, ids, request

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SAMPLED = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


def meta(answer: Answer) -> dict[str, Any]:
    """SGLang's, of the last event of a stream or of a whole answer."""
    assert answer.status == 200, answer
    lines = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
    whole = lines[-2] if lines[-1] == b"[DONE]" else lines[-1]
    found: dict[str, Any] = json.loads(whole)["meta_info"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_sglangs_finds_what_is_cached(router: Router, sglang: Engine, stream: bool) -> None:
    topic = ids(f"generate {router} {stream}", TOPIC_TOKENS)
    body = {"input_ids": topic, "sampling_params": SAMPLED, "stream": stream}

    def known(answer: Answer) -> bool:
        return meta(answer)["cached_tokens"] >= PREFIX_LEAST and answer.predicted >= PREFIX_LEAST

    first = ask(f"{router.url}/generate", body)
    assert (first.worker, first.predicted, meta(first)["cached_tokens"]) == (sglang.worker_id, 0, 0)
    again = eventually(lambda: ask(f"{router.url}/generate", body), known)
    assert abs(again.predicted - meta(again)["cached_tokens"]) <= sglang.block
    onward = router.ask({"model": "tiny", "prompt": [*topic, 7, 8, 9], "max_tokens": 1})
    assert (onward.worker, onward.predicted >= PREFIX_LEAST) == (sglang.worker_id, True)


@pytest.mark.parametrize(
    "body", [{"text": "Naïve café, 東京 🙂?\n"}, {"text": ["One.", "Two."]}, {"input_ids": [[5, 6], [7]]}]
)
def test_sglangs_answer_is_its_own(local_router: Router, sglang: Engine, body: dict[str, Any]) -> None:
    asked = {**body, "sampling_params": SAMPLED}
    ours, direct = (ask(f"{url}/generate", asked) for url in (local_router.url, sglang.url))
    assert (ours.status, ours.worker) == (200, sglang.worker_id)
    assert _texts(ours) == _texts(direct)


def _texts(answer: Answer) -> list[str]:
    found = answer.json()
    return [each["text"] for each in (found if isinstance(found, list) else [found])]


def test_sglangs_text_has_the_tokens_of_a_completion(local_router: Router, sglang: Engine) -> None:
    asked = request("text", f"generate {sglang}", tail="the same")
    pinned = {"X-Router-Target-Worker": sglang.worker_id}

    def known(answer: Answer) -> bool:
        return int(meta(answer)["cached_tokens"]) >= PREFIX_LEAST

    assert local_router.ask(asked, sglang.worker_id).status == 200
    body = {"text": asked["prompt"], "sampling_params": SAMPLED}
    found = eventually(lambda: ask(f"{local_router.url}/generate", body, headers=pinned), known)
    assert abs(found.predicted - meta(found)["cached_tokens"]) <= sglang.block


@pytest.mark.parametrize("stream", [False, True])
def test_vllms_finds_what_is_cached(router: Router, engines: list[Engine], stream: bool) -> None:
    topic = ids(f"inference {router} {stream}", TOPIC_TOKENS)
    sampled = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    body = {"model": "tiny", "token_ids": topic, "sampling_params": sampled, "stream": stream}

    def known(answer: Answer) -> bool:
        return answer.status == 200 and answer.predicted >= PREFIX_LEAST

    first = ask(f"{router.url}/inference/v1/generate", body)
    assert first.status == 200, first
    assert first.worker in {engine.worker_id for engine in engines if engine.kind == "vllm"}
    assert first.predicted == 0
    again = eventually(lambda: ask(f"{router.url}/inference/v1/generate", body), known)
    assert again.worker == first.worker
    onward = router.ask({"model": "tiny", "prompt": [*topic, 7, 8, 9], "max_tokens": 1})
    assert (onward.worker, onward.reported >= PREFIX_LEAST) == (first.worker, True)


def test_tokens_are_told_by_an_engine(local_router: Router) -> None:
    text = "Naïve café"
    tokens = ask(f"{local_router.url}/tokenize", {"model": "tiny", "prompt": text}).json()["tokens"]
    back = ask(f"{local_router.url}/detokenize", {"model": "tiny", "tokens": tokens}).json()
    assert text in (back.get("prompt") or back.get("text"))
