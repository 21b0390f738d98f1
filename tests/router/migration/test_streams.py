"""Streams that break anywhere, once or twice, and go on: what a client sees is what it would have seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.disaggregation.legs import read_body
from router.http.chunked import ChunkedBody, decode_chunks
from router.http.relay import chunk
from router.migration.bodies import continuation, tokens_left, with_ids
from router.migration.record import Record
from router.migration.relay import FIRST_HELD, RecordedEvents
from router.tokens import Endpoint
from tests.examples import examples
from tests.router.http.test_chunked import pieces_of
from tests.router.migration.client import seen
from tests.router.migration.engine import TEXTS, Engine, ends_whole, text_of

LAST = b"0\r\n\r\n"


class Case(NamedTuple):
    endpoint: Endpoint
    body: dict[str, Any]
    engine: Engine


@st.composite
def cases(draw: st.DrawFn, *, alone: bool = False) -> Case:
    """`alone`: each token comes in an event of its own."""
    prompt = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    answer = [token for text in draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=12)) for token in text]
    groups = [1] if alone else draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    endpoint: Endpoint = draw(st.sampled_from(["completions", "chat"]))
    body: dict[str, Any] = {
        "model": "m",
        "stream": True,
        "max_tokens": len(answer),
        "min_tokens": draw(st.integers(0, 3)),
    }
    body |= {"prompt": prompt} if endpoint == "completions" else {"messages": [{"role": "user", "content": "?"}]}
    usage = draw(
        st.sampled_from([{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
    )
    body |= {"stream_options": usage} if usage else {}
    return Case(endpoint, body, Engine(prompt, answer, groups, parses=draw(st.booleans())))


class Router:
    """The pure parts put together as the exchange does, for one request."""

    def __init__(self, case: Case, held_limit: int = FIRST_HELD) -> None:
        self.case = case
        self.held_limit = held_limit
        self.body = read_body(json.dumps(case.body).encode())
        self.record = Record(case.endpoint == "chat", case.body.get("return_token_ids") is True, ends_whole)
        self.relay = RecordedEvents(self.record, held_limit)
        self.sent = b""

    def first(self) -> list[bytes]:
        return list(self.case.engine.stream(self.case.endpoint, json.loads(with_ids(self.body))))

    def onward(self, name: str) -> list[bytes] | None:
        """What another engine is to be heard of; None when there is nothing."""
        end = self.record.ending("stream_options" in self.case.body)
        if end is not None:
            self.sent += chunk(end) + LAST if end else LAST
            return None
        trouble = self.record.cut()
        assert trouble is None, trouble
        self.relay = RecordedEvents(self.record, self.held_limit)
        engine = replace(self.case.engine, name=name)
        if not self.record.output:
            return list(engine.stream(self.case.endpoint, json.loads(with_ids(self.body))))
        assert self.record.prompt is not None
        prompt, output = self.record.prompt, self.record.output
        left = tokens_left(self.body, self.case.endpoint, len(prompt), len(output), None)
        assert left is not None
        asked = json.loads(continuation(self.body, prompt, output, left))
        assert asked.get("min_tokens", 0) == max(0, self.case.body["min_tokens"] - len(output))
        return list(engine.stream("completions", asked))

    def hear(self, events: list[bytes], broken_at: int | None, where: list[int]) -> bool:
        """Whether the stream came to its end."""
        whole = b"".join(map(chunk, events)) + LAST
        coming = ChunkedBody()
        for piece in pieces_of(whole if broken_at is None else whole[: broken_at % len(whole)], where):
            self.sent += self.relay.body(piece, coming.feed(piece))
        return coming.done

    @property
    def content(self) -> bytes:
        assert self.sent.endswith(LAST)
        return decode_chunks(self.sent)


cuts = st.lists(st.integers(0, 3000), max_size=6)


@given(cases(), cuts)
def test_an_unbroken_stream_is_as_if_nobody_had_asked_for_tokens(case: Case, where: list[int]) -> None:
    router = Router(case)
    assert router.hear(router.first(), None, where)
    assert router.content == b"".join(case.engine.stream(case.endpoint, case.body))
    assert list(router.record.prompt or ()) == case.engine.prompt
    assert list(router.record.output) == case.engine.answer


@given(cases(), cuts)
def test_a_client_that_asks_for_tokens_gets_them(case: Case, where: list[int]) -> None:
    case.body["return_token_ids"] = True
    router = Router(case)
    assert router.hear(router.first(), None, where)
    assert router.content == b"".join(case.engine.stream(case.endpoint, case.body))


def go_on(router: Router, breaks: list[int], where: list[int]) -> None:
    events: list[bytes] | None = router.first()
    for number, broken_at in enumerate(breaks):
        assert events is not None
        if router.hear(events, broken_at, where):
            return
        events = router.onward(f"other {number}")
        if events is None:
            return
    assert router.hear(events or [], None, where)


@settings(max_examples=examples(400))
@given(cases(), st.lists(st.integers(0, 6000), min_size=1, max_size=3), cuts)
def test_a_broken_stream_goes_on(case: Case, breaks: list[int], where: list[int]) -> None:
    router = Router(case)
    go_on(router, breaks, where)
    assert_like_unbroken(router)


@settings(max_examples=examples(200))
@given(cases(alone=True), st.lists(st.integers(0, 6000), min_size=1, max_size=2), cuts)
def test_tokens_go_on_too_each_once(case: Case, breaks: list[int], where: list[int]) -> None:
    case.body["return_token_ids"] = True
    router = Router(case)
    go_on(router, breaks, where)
    assert_like_unbroken(router)
    assert seen(router.content).tokens == case.engine.answer
    assert seen(router.content).prompt == case.engine.prompt


def said(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(event[6:]) for event in content.split(b"\n\n") if event.startswith(b"data: {")]


def plain(event: dict[str, Any]) -> dict[str, Any]:
    """Without what tells which engines it came from, if any made it at all."""
    usage = {name: count for name, count in (event.get("usage") or {}).items() if name != "prompt_tokens_details"}
    return {name: value for name, value in event.items() if name != "system_fingerprint"} | {"usage": usage}


def test_a_body_that_ends_before_its_stream_is_not_ended() -> None:
    engine = Engine([0], [1, 2, 3], [1])
    router = Router(Case("completions", {"model": "m", "stream": True, "max_tokens": 3, "prompt": [0]}, engine))
    assert router.hear(router.first()[:2], None, [])
    assert LAST not in router.sent
    assert not router.record.done


def test_lines_of_a_stream_may_end_as_those_of_http() -> None:
    told = b'data: {"choices":[{"index":0,"text":"x","token_ids":[%d]%b}]}\r\n\r\n'
    events = chunk(told % (5, b',"prompt_token_ids":[1]')) + chunk(told % (6, b""))
    record = Record(False, False, None)
    RecordedEvents(record).body(events, len(events))
    assert record.output.tolist() == [5, 6]


def test_an_event_beyond_all_bounds_is_passed_on_and_is_the_end_of_it() -> None:
    case = Case("completions", {"stream": True, "max_tokens": 3, "prompt": [0]}, Engine([0], [1, 2, 3], [1]))
    router = Router(case, held_limit=50)
    assert router.hear(router.first(), None, [100, 150])
    assert seen(router.content).text == text_of([1, 2, 3])
    assert "too long" in str(router.record.cut())


def assert_like_unbroken(router: Router) -> None:
    case = router.case
    got, whole = seen(router.content), seen(b"".join(case.engine.stream(case.endpoint, case.body)))
    assert got.text == whole.text == text_of(case.engine.answer)
    assert (got.roles, got.ends, got.reasons, got.errors) == (whole.roles, 1, ["length"], [])
    assert got.usage == whole.usage
    assert len(got.names) == 1
    if not case.body.get("return_token_ids"):
        assert (got.prompt, got.tokens) == (None, [])
