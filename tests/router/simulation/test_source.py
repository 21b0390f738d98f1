from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from router.ab.arrivals import Arrivals
from router.ab.errors import RunError
from router.ab.trace import Row, reuse
from router.simulation.prompts import sequence_hashes
from router.simulation.source import Requests

CHAT = Requests("chat", duration=20.0)


def test_a_rate_moves_the_same_requests_closer_together() -> None:
    usual, twice = CHAT.rows(0, 1.0), CHAT.rows(0, 2.0)
    assert [row.timestamp / 2 for row in usual] == [row.timestamp for row in twice]
    assert [row.hash_ids for row in usual] == [row.hash_ids for row in twice]


@pytest.mark.parametrize("arrivals", ["poisson", "bursts"])
def test_arrivals_are_drawn_anew_at_the_same_mean_rate(arrivals: Arrivals) -> None:
    requests = Requests("hot-prompt", duration=300.0)
    usual, drawn = requests.rows(0, 1.0), requests._replace(arrivals=arrivals).rows(0, 1.0)
    assert [row.hash_ids for row in drawn] == [row.hash_ids for row in usual]
    assert all(one.timestamp <= two.timestamp for one, two in pairwise(drawn))
    assert drawn[-1].timestamp == pytest.approx(usual[-1].timestamp, rel=0.15)
    assert requests._replace(arrivals=arrivals).rows(0, 1.0) == drawn


def test_without_reuse_nothing_is_shared() -> None:
    usual, control = CHAT.rows(0, 1.0), CHAT._replace(reuse=False).rows(0, 1.0)
    assert reuse(usual) > 0.3
    assert reuse(control) == 0
    assert [row.input_length for row in usual] == [row.input_length for row in control]
    first, second = (sequence_hashes(row, 16).tolist() for row in control[:2])
    assert not set(first) & set(second)


def test_a_trace_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [0]}\n' * 3)
    assert len(Requests(trace=str(path), limit=2).rows(0, 1.0)) == 2


def test_a_synthetic_trace_is_as_ab_makes_it() -> None:
    assert Requests(trace="synthetic:agent", limit=5).rows(1, 1.0) != Requests(trace="synthetic", limit=5).rows(1, 1.0)


def test_hash_ids_may_be_any_whole_numbers() -> None:
    chains = [sequence_hashes(Row(0, 512, 1, (one,)), 16) for one in (0, 1, -1, -(2**62) + 5, 2**70 + 1)]
    assert len({int(chain[0]) for chain in chains[:4]}) == 4
    assert chains[4].tolist() == chains[1].tolist()  # of a longer one its last 64 bits


def test_blocks_may_be_smaller_or_larger_than_what_an_id_stands_for() -> None:
    rows = [Row(0, 104, 1, ids, 32) for ids in ((0, 1, 2, 5), (0, 3, 4, 6))]
    small, same, large = ([sequence_hashes(row, size).tolist() for row in rows] for size in (8, 32, 64))
    for (first, second), shared, length in ((small, 4, 13), (same, 1, 3), (large, 0, 1)):
        assert (len(first), len(second)) == (length, length)
        assert first[:shared] == second[:shared]
        assert set(first[shared:]).isdisjoint(second[shared:])


def test_nothing_is_left() -> None:
    with pytest.raises(RunError, match="no request is left"):
        Requests("chat", duration=0.001).rows(0, 1.0)
