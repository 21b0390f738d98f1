"""One pair and each connector: the answers are a plain engine's, and come from KV that was moved."""

from __future__ import annotations

import time

import pytest

from tests.real.asking import Answer
from tests.real.eventually import eventually
from tests.real.prompts import KINDS, Kind

from .halves import CONNECTORS, Connector, Half, Scene, Stage, Weighted
from .requests import client_that_leaves, directly, long_to_read, long_to_write, telling

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

LATEST_ERROR = 60.0


# Mooncake first: the next module goes on with the other pair.
@pytest.fixture(scope="module", params=sorted(CONNECTORS))
def connector(request: pytest.FixtureRequest) -> Connector:
    found: Connector = request.param
    return found


@pytest.fixture
def scene(stage: Stage, connector: Connector) -> Scene:
    return stage.scene(connector)


@pytest.fixture
def plain(scene: Scene, stage: Stage) -> Weighted:
    return stage.plain()


@pytest.fixture
def prefill(scene: Scene) -> Half:
    return scene.prefills[0]


@pytest.fixture
def decode(scene: Scene) -> Half:
    return scene.decodes[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_answer_is_the_plain_engines(
    scene: Scene, plain: Weighted, prefill: Half, decode: Half, kind: Kind, stream: bool
) -> None:
    body = telling(kind, f"equal {prefill.connector} {kind} {stream}", stream=stream)
    expected = directly(plain, body)
    before = decode.fetched()

    first = scene.router.ask(body)
    assert_same(first, expected)
    assert_made_by(first, prefill, decode)
    assert decode.fetched() - before == first.prompt_tokens
    assert first.reported < prefill.block, "what the decode worker fetched was not cached"

    second = scene.router.ask(body)
    assert_same(second, expected)
    assert second.reported == in_full_blocks(second.prompt_tokens - 1, prefill), "what the prefill worker had cached"


def test_next_request_shares_a_prefix(scene: Scene, plain: Weighted, prefill: Half) -> None:
    first = telling("ids", f"prefix {prefill.connector}")
    other = first | {"prompt": first["prompt"][:160] + first["prompt"][:200]}
    assert_same(scene.router.ask(first), directly(plain, first))
    answer = scene.router.ask(other)
    assert_same(answer, directly(plain, other))
    assert answer.reported == 160


@pytest.mark.parametrize("several", ["prompts", "answers"])
def test_several_sequences_are_right_or_refused(scene: Scene, plain: Weighted, prefill: Half, several: str) -> None:
    """With one transfer for two, engines answer 200 and one answer is wrong, or never end."""
    body = telling("ids", f"several {prefill.connector}")
    if several == "prompts":
        body |= {"prompt": [body["prompt"], telling("ids", f"several more {prefill.connector}")["prompt"]]}
    else:
        body |= {"n": 2, "temperature": 0.8, "seed": 7}
    answer, expected = scene.router.ask(body), directly(plain, body)
    if answer.status == 200:
        assert all_token_ids(answer) == all_token_ids(expected)
    else:
        assert 400 <= answer.status < 600, answer
        assert answer.json()["error"]["message"]


def test_first_token_may_end_the_answer(scene: Scene, plain: Weighted, prefill: Half) -> None:
    """The prefill worker must compute it nevertheless: engines hand over only what ended by its length."""
    body = telling("ids", f"stop {prefill.connector}")
    [token, *_] = directly(plain, body).token_ids
    stopped = {name: value for name, value in body.items() if name != "ignore_eos"} | {"stop_token_ids": [token]}
    assert_same(scene.router.ask(stopped), directly(plain, stopped))


def test_client_leaves_while_it_decodes(scene: Scene, prefill: Half, decode: Half) -> None:
    with client_that_leaves(scene.router.url, long_to_write(f"leaves {prefill.connector}")) as client:
        assert client.getresponse().read(200)
        assert decode.running() == 1
    until_idle(prefill, decode)
    assert scene.router.ask(telling("ids", f"stays {prefill.connector}")).status == 200


def test_client_leaves_while_it_prefills(scene: Scene, prefill: Half, decode: Half) -> None:
    generated = decode.total("vllm:generation_tokens_total")
    with client_that_leaves(scene.router.url, long_to_read(f"leaves early {prefill.connector}")):
        eventually(lambda: prefill.running() + decode.running(), within=10.0)
    until_idle(prefill, decode)
    assert decode.total("vllm:generation_tokens_total") == generated
    assert scene.router.ask(telling("ids", f"stays on {prefill.connector}")).status == 200


def test_pair_that_is_gone_comes_back(
    scene: Scene, plain: Weighted, stage: Stage, prefill: Half, decode: Half, connector: Connector
) -> None:
    body = telling("ids", f"gone {connector}")
    expected = directly(plain, body)
    assert_same(scene.router.ask(body), expected)
    for half in (prefill, decode):
        half.process.kill()
        assert_proper_error(scene, telling("ids", f"gone {connector} {half.role}"))
    stage.scene(connector)
    eventually(lambda: scene.router.ask(body), lambda answer: answer.status == 200)
    new = telling("ids", f"back {connector}")
    before = decode.fetched()
    assert_same(scene.router.ask(new), directly(plain, new))
    assert decode.fetched() > before


def assert_same(answer: Answer, expected: Answer) -> None:
    assert expected.status == 200, expected
    assert answer.status == 200, answer
    assert len(expected.token_ids) in (1, 16)
    assert answer.token_ids == expected.token_ids


def assert_made_by(answer: Answer, prefill: Half, decode: Half) -> None:
    made_by = (answer.headers.get("x-router-prefill-worker"), answer.worker)
    assert made_by == (prefill.worker_id, decode.worker_id)


def assert_proper_error(scene: Scene, body: dict[str, object]) -> None:
    began = time.monotonic()
    answer = scene.router.ask(body)
    assert answer.status in (502, 503, 504), answer
    assert answer.json()["error"]["message"]
    assert time.monotonic() - began < LATEST_ERROR


def all_token_ids(answer: Answer) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def in_full_blocks(tokens: int, half: Half) -> int:
    return tokens // half.block * half.block


def until_idle(*halves: Half) -> None:
    eventually(lambda: [half.running() for half in halves], lambda running: not any(running), within=10.0)
