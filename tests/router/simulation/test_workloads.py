from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import fmean, pvariance
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sim.timing import StepTiming, StepWork
from router.ab.trace import BLOCK_TOKENS, Row, reuse
from router.simulation.traffic import Common, Drawn, Prompt, Sessions, Shape, Source, Zipf, bursts, poisson, session
from router.simulation.workloads import WORKLOADS, Workload


class Expected(NamedTuple):
    reuse: tuple[float, float]
    """Share of prompt tokens that one cache without bounds would have held, over the whole run."""
    rate: tuple[float, float]
    """Requests a second in the second half of the run, when sessions are under way."""
    seconds: float = 240.0
    """The run: long enough for the workload's sessions, short enough for a test."""


EXPECTED = {
    "chat": Expected((0.60, 0.72), (38, 52)),
    "long-documents": Expected((0.70, 0.85), (3, 5)),
    "agents": Expected((0.90, 0.97), (12, 22)),
    "hot-prompt": Expected((0.88, 0.93), (23, 29), 120),
    "no-reuse": Expected((0, 0), (15, 20), 120),
    "bursts": Expected((0.50, 0.70), (30, 70), 300),
    "mixed-hardware": Expected((0.60, 0.72), (30, 42)),
    "batch-few-shot": Expected((0.90, 0.95), (190, 210), 30),
    "large-fleet": Expected((0.82, 0.94), (200, 275), 180),
    "huge-fleet": Expected((0.78, 0.88), (1_900, 2_500), 40),
    "small-caches": Expected((0.68, 0.80), (7, 13), 600),
    "big-caches": Expected((0.78, 0.90), (3, 6.5), 600),
    "tree-search": Expected((0.96, 0.99), (24, 44)),
    "rag": Expected((0.20, 0.35), (12, 16)),
    "long-answers": Expected((0.60, 0.72), (3.8, 5.2)),
    "adapters": Expected((0.60, 0.72), (38, 52)),
}
NAMES = sorted(WORKLOADS)


@cache
def trace(name: str) -> list[Row]:
    return WORKLOADS[name].rows(0, EXPECTED[name].seconds)


@cache
def under_way(name: str) -> list[tuple[Row, int]]:
    """The rows of the second half, each with the prompt tokens that no earlier row had."""
    seen: set[int] = set()
    rows = []
    for row in trace(name):
        new = row.input_length - sum(block in seen for block in row.hash_ids) * BLOCK_TOKENS
        rows.append((row, max(new, 1)))
        seen.update(row.hash_ids)
    half = EXPECTED[name].seconds / 2 * 1000
    return [(row, new) for row, new in rows if row.timestamp >= half]


def utilisation(name: str) -> float:
    """The estimate that workloads.py states: by the engine's own timing, with one unbounded cache for the fleet."""
    workload, rows, timing = WORKLOADS[name], under_way(name), StepTiming()
    batch = min(256, workload.cache_tokens / fmean(row.input_length + row.output_length for row, _ in rows))
    seconds = 0.0
    for row, new in rows:
        prefill, decode = StepWork(), StepWork()
        prefill.add_prefill(row.input_length - new, new)
        decode.add_decode(row.input_length + row.output_length // 2)
        seconds += timing.step_time(prefill) - timing.base_s
        seconds += row.output_length * (timing.step_time(decode) - timing.base_s * (1 - 1 / batch))
    speed = sum(1 / workload.slow.get(worker, 1.0) for worker in range(workload.workers))
    return seconds / speed / (EXPECTED[name].seconds / 2)


def dispersion(moments: Sequence[float], begin: float, end: float, window: float = 5.0) -> float:
    """Variance over mean of the counts in windows: 1 for a Poisson process."""
    counts = Counter(int((at - begin) / window) for at in moments if begin <= at < end)
    values = [counts[index] for index in range(int((end - begin) / window))]
    return pvariance(values) / fmean(values)


def request_dispersion(name: str) -> float:
    end = EXPECTED[name].seconds
    return dispersion([row.timestamp / 1000 for row in trace(name)], end / 3, end)


def test_every_workload_says_what_it_is() -> None:
    assert set(EXPECTED) == set(WORKLOADS)
    for name, workload in WORKLOADS.items():
        assert workload.name == name
        assert workload.about.endswith(".")
        assert set(workload.slow) <= set(range(workload.workers))


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_the_trace(name: str) -> None:
    workload = WORKLOADS[name]
    seconds = 160 / workload.workers
    assert workload.rows(1, seconds) == workload.rows(1, seconds) != workload.rows(2, seconds)


@given(name=st.sampled_from(NAMES), seed=st.integers(0, 1000), seconds=st.floats(0.0, 20.0))
def test_rows_are_valid_whatever_the_seed(name: str, seed: int, seconds: float) -> None:
    workload = WORKLOADS[name]
    check(workload, workload.rows(seed, min(seconds, 300 / workload.workers)), seconds)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_valid(name: str) -> None:
    check(WORKLOADS[name], trace(name), EXPECTED[name].seconds)


def check(workload: Workload, rows: Sequence[Row], seconds: float) -> None:
    before: dict[int, int | None] = {}
    partial: dict[int, tuple[tuple[int, ...], int]] = {}
    for row in rows:
        assert 0 <= row.timestamp <= seconds * 1000
        assert 1 <= row.input_length <= 100_000
        assert row.output_length >= 1
        assert row.input_length + row.output_length <= 0.9 * workload.cache_tokens
        assert len(row.hash_ids) == -(-row.input_length // BLOCK_TOKENS)
        # One cache must be able to go by ids alone: each names what came before it, and a partial block one prompt.
        for previous, block in zip((None, *row.hash_ids), row.hash_ids, strict=False):
            assert before.setdefault(block, previous) == previous
        if row.input_length % BLOCK_TOKENS:
            prompt = (row.hash_ids, row.input_length)
            assert partial.setdefault(row.hash_ids[-1], prompt) == prompt
    assert partial.keys().isdisjoint(block for row in rows for block in row.hash_ids[:-1])
    assert all(one.timestamp <= two.timestamp for one, two in itertools.pairwise(rows))


@pytest.mark.parametrize("name", NAMES)
def test_reuse_and_rate(name: str) -> None:
    expected, rows = EXPECTED[name], under_way(name)
    assert expected.reuse[0] <= reuse(trace(name)) <= expected.reuse[1]
    assert expected.rate[0] <= len(rows) / (expected.seconds / 2) <= expected.rate[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_nominal_rate_is_about_half_of_capacity(name: str) -> None:
    assert 0.35 <= utilisation(name) <= 0.65


def test_bursts_are_burstier_than_poisson() -> None:
    assert 0.5 < request_dispersion("hot-prompt") < 1.6
    assert request_dispersion("bursts") > 5 * max(1.0, request_dispersion("chat"))


def test_bursts_keep_the_mean_rate() -> None:
    moments = list(bursts(Source(0), 10.0, 6_000.0))
    assert len(moments) == pytest.approx(60_000, rel=0.05)
    assert moments == sorted(moments)
    assert dispersion(moments, 0, 6_000) > 20 * dispersion(list(poisson(Source(0), 10.0, 6_000.0)), 0, 6_000)


def test_hot_prompt_shares_its_prefix_and_nothing_else() -> None:
    rows = trace("hot-prompt")
    shared = 6_144 // BLOCK_TOKENS
    assert len({row.hash_ids[:shared] for row in rows}) == 1
    assert max(Counter(block for row in rows for block in row.hash_ids[shared:]).values()) == 1
    assert all(row.input_length > 6_144 for row in rows)


def test_few_shot_prompts_share_forty_templates() -> None:
    rows = trace("batch-few-shot")
    uses = Counter(row.hash_ids[0] for row in rows)
    assert len(uses) == 40
    assert uses.most_common(1)[0][1] > 20 * min(uses.values())
    assert {min(row.output_length for row in rows), max(row.output_length for row in rows)} == {8, 64}


def test_agents_are_of_a_dozen_applications() -> None:
    rows = trace("agents")
    uses = Counter(row.hash_ids[0] for row in rows)
    assert len(uses) == 12
    assert all(len({row.hash_ids[:8] for row in rows if row.hash_ids[0] == first}) == 1 for first in uses)


def test_documents_are_asked_several_times() -> None:
    rows = trace("long-documents")
    uses = Counter(row.hash_ids[1] for row in rows)
    assert 3 < fmean(uses.values()) < 6
    assert min(row.input_length for row in rows) > 20_000


def test_samples_of_a_tree_search_come_eight_at_once() -> None:
    times = Counter((row.timestamp, row.hash_ids) for row in trace("tree-search"))
    assert set(times.values()) == {8}


def test_retrieved_prefixes_part_after_a_chunk_or_two() -> None:
    seen: set[int] = set()
    found = []
    for row in trace("rag"):
        found.append(sum(block in seen for block in row.hash_ids))
        seen.update(row.hash_ids)
    # Two blocks of instructions, and chunks of one or two blocks.
    assert 2 <= fmean(found[100:]) < 4
    assert sum(blocks <= 6 for blocks in found) > 0.97 * len(found)


def test_long_answers() -> None:
    assert {bound(row.output_length for row in trace("long-answers")) for bound in (min, max)} == {1_000, 6_000}


def test_small_caches_hold_less_than_is_live() -> None:
    rows, workload = trace("small-caches"), WORKLOADS["small-caches"]
    first = {block: row.timestamp for row in reversed(rows) for block in row.hash_ids}
    last = {block: row.timestamp for row in rows for block in row.hash_ids}
    live = sum(last[block] - first[block] for block in first) / (EXPECTED[workload.name].seconds * 1000) * BLOCK_TOKENS
    assert live > 0.8 * workload.workers * workload.cache_tokens


def test_a_session_grows_by_its_answers_and_turns() -> None:
    fixed = [Drawn(tokens, 0.0, tokens, tokens) for tokens in (600, 100, 50, 3)]
    shape = Shape(opening=fixed[0], answer=fixed[1], turn=fixed[2], turns=Drawn(4, 0.0, 4, 4), pause=fixed[3])
    source = Source(0)
    rows = list(session(shape, source, Prompt(source.fresh(1)), 10.0, 100.0))
    assert [row.input_length for row in rows] == [1_112, 1_262, 1_412, 1_562]
    assert [row.timestamp for row in rows] == [10_000, 15_000, 20_000, 25_000]
    assert [row.hash_ids for row in rows] == [(0, 1, 2), (0, 1, 3), (0, 1, 4), (0, 1, 5, 6)]


def test_a_session_ends_with_the_trace_and_at_its_limit() -> None:
    shape = Shape(Drawn(600, 0.0, 600, 600), Drawn(100, 0.0, 100, 100), Drawn(9, 0.0, 9, 9), limit=1_000)
    assert len(list(session(shape, Source(0), Prompt([]), 0.0, 1e9))) == 3
    assert len(list(session(shape, Source(0), Prompt([]), 0.0, 4.0))) == 2
    assert list(Sessions(1e-9, shape)(Source(0), 1.0)) == []


def test_popularity_follows_zipf() -> None:
    source, popularity = Source(0), Zipf(3, 1.0)
    counts = Counter(popularity.draw(source) for _ in range(11_000))
    assert [counts[rank] for rank in range(3)] == [pytest.approx(share, rel=0.1) for share in (6_000, 3_000, 2_000)]
    draw = Common(2, (3, 3)).drawing(Source(0))
    assert {tuple(draw()) for _ in range(50)} == {(0, 1, 2), (3, 4, 5)}
