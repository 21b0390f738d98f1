"""What a worker may make the router keep has an end."""

from __future__ import annotations

import pytest

import router.split.prefill_leg
from router.http.chunked import ChunkedBody, MalformedChunk
from tests.fakes.scripted_worker import ScriptedWorker, answer
from tests.router.proxy.test_proxy_pairs import ask, failures, router_of


async def test_a_prefill_workers_answer_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.split.prefill_leg, "MOST_BYTES", 1000)
    async with (
        ScriptedWorker("p", default=answer(b'{"id":"' + b"x" * 1000 + b'"}')) as p,
        ScriptedWorker("d") as d,
        router_of("nixl", p, d) as running,
    ):
        assert (await ask(running)).status == 502
        assert failures(running)[0] > 0
    assert d.requests == []


def feed_bytes(body: ChunkedBody, data: bytes) -> None:
    for at in range(len(data)):
        body.feed(data[at : at + 1])


@pytest.mark.parametrize("line", [b"5;" + b"x" * 5000, b"0\r\n" + b"x" * 5000])
def test_a_chunks_size_line_and_a_trailer_have_an_end(line: bytes) -> None:
    with pytest.raises(MalformedChunk, match="too long"):
        ChunkedBody().feed(line)
    with pytest.raises(MalformedChunk, match="too long"):
        feed_bytes(ChunkedBody(), line)
