"""A block size that is not that of the engine's events: what vLLM's /metrics tell may be wrong, its events are not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import engines.vllm.decode
from engines.problems import blocks_of_another_size
from indexer.types import WorkerRank
from publishers.local_plane import LocalPlane
from publishers.rank import EngineRank, Epochs

WRONG = "no prefix is found by a wrong size"


def store(blocks: int, size: int, medium: str = "GPU") -> list[Any]:
    """As vLLM 0.20 sends it: an array."""
    return ["BlockStored", list(range(1, blocks + 1)), None, list(range(blocks * size)), size, None, medium]


async def told(caplog: pytest.LogCaptureFixture, block_size: int | None, *steps: list[list[Any]]) -> list[str]:
    """What is said of the block size when the engine tells of these stores, step by step."""
    plane, epochs = LocalPlane(), Epochs(lambda: 1)
    rank = EngineRank(WorkerRank("w", 0), plane, "default", epochs, engines.vllm.decode.Decoder, block_size)
    await plane.start()
    await rank.start()
    for events in steps:
        rank.apply(msgspec.msgpack.encode([1.0, events, 0]))
    await rank.close()
    await plane.close()
    return [record.getMessage() for record in caplog.records if WRONG in record.getMessage()]


async def test_blocks_of_another_size_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    said = await told(caplog, 16, [store(1, 16)], [store(2, 64), store(1, 16)], [store(3, 64)])
    assert said == [blocks_of_another_size(16, 64)]
    assert "block_size=64" in said[0]


@pytest.mark.parametrize(
    "steps",
    [
        [[store(2, 16)], [store(2, 64)]],  # the attention that counts has blocks of this size
        [[store(2, 64), store(8, 16)]],
        [[store(1, 8)], [store(2, 16)]],  # a prompt's end within a block
        [[store(2, 256, medium="CPU")]],
        [[["BlockRemoved", [1], "GPU"]], []],
    ],
)
async def test_what_is_no_reason_to_doubt_the_block_size(
    caplog: pytest.LogCaptureFixture, steps: list[list[list[Any]]]
) -> None:
    assert await told(caplog, 16, *steps) == []


async def test_no_block_size_is_none_that_could_be_wrong(caplog: pytest.LogCaptureFixture) -> None:
    assert await told(caplog, None, [store(2, 64)]) == []
