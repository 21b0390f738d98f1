from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from router.ab.errors import RunError
from router.ab.statistics import spread
from router.ab.trace import Row
from router.scheduling.cheapest import Cheapest
from router.simulation.changes import parse_change
from router.simulation.figures import Figures, Goal, summarise
from router.simulation.fleet import FleetSettings
from router.simulation.knee import FURTHEST, GROWTH, Knee
from router.simulation.plan import BASELINES, POLICIES
from router.simulation.run import Run, find_policy, runner
from router.simulation.source import Requests

SMALL = Run(Requests("agents", duration=12.0), FleetSettings(workers=3), "auto", rate=3.0)


@pytest.mark.parametrize("policy", [*POLICIES, "ttft", "random", "least-loaded", "kv"])
def test_a_seed_decides_a_run(policy: str) -> None:
    run = SMALL._replace(policy=policy, changes=(parse_change("2:kill:1"), parse_change("2.5:join:1")))
    figures = run.figures()
    assert figures == run.figures() != run._replace(seed=1).figures()
    assert figures.refused == 0


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing() -> None:
    runs = [SMALL._replace(policy=policy) for policy in ("auto", "affinity")]
    with runner(1) as here, runner(2) as there:
        assert list(here(runs)) == list(there(runs))


def test_a_second_signal_does_not_break_off_how_the_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` sends it, and who presses Ctrl-C twice."""
    end = ProcessPoolExecutor.shutdown
    ends = []

    def interrupted(pool: ProcessPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        ends.append(wait)
        if len(ends) == 1:
            signal.raise_signal(signal.SIGTERM)
        end(pool, wait, cancel_futures=cancel_futures)

    def on_signal(*_: object) -> NoReturn:
        raise AssertionError("interrupted again")

    monkeypatch.setattr(ProcessPoolExecutor, "shutdown", interrupted)
    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        with pytest.raises(RuntimeError, match="the first"), runner(2):
            raise RuntimeError("the first")
        assert signal.getsignal(signal.SIGTERM) is on_signal
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_processes_end_with_the_one_that_was_killed() -> None:
    """As for want of memory. They share its output, which ends with the last of them."""
    rates = ",".join(map(str, range(1, 1000)))
    command = [sys.executable, "-u", "-m", "router", "simulate", "--workload", "chat", "--duration", "2"]
    command += ["--policies", "random", "--sweep", rates, "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        try:
            assert process.stdout.readline().startswith(b"rate 1, ")  # many are left
            process.kill()
            process.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_affinity_follows_the_longest_prefix() -> None:
    crowd = SMALL._replace(requests=Requests("hot-prompt", duration=10.0), rate=0.5)
    alike, even = (crowd._replace(policy=policy).figures() for policy in ("affinity", "round-robin"))
    assert alike.hit_ratio > even.hit_ratio
    assert alike.imbalance > 1.9 > even.imbalance


def test_policies_have_names() -> None:
    assert isinstance(find_policy("affinity"), Cheapest)
    with pytest.raises(RunError, match=r"there is no policy 'fastest'; there are auto, .*, round-robin, affinity$"):
        find_policy("fastest")


def test_a_request_that_fits_no_cache_is_told_before() -> None:
    small = SMALL._replace(fleet=FleetSettings(cache_tokens=1024))
    with pytest.raises(RunError, match="does not fit a cache of 1024"):
        small.figures()


def test_a_cache_holds_whole_blocks(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 88, "hash_ids": [0]}\n')
    run = SMALL._replace(requests=Requests(trace=str(trace)), fleet=FleetSettings(cache_tokens=700, block_size=512))
    with pytest.raises(RunError, match="600 tokens does not fit a cache of 700"):
        run.figures()


def test_a_hopeless_run_ends_early_and_is_still_above_the_limit() -> None:
    whole = SMALL._replace(rate=20.0, policy="affinity").figures()
    limit = whole.ttft.mean / 10
    part = SMALL._replace(rate=20.0, policy="affinity", most_ttft=limit).figures()
    assert part.requests < whole.requests
    assert part.ttft.mean > limit


def fake(asked: list[Run]) -> Iterator[Figures]:
    """Everybody's TTFT grows tenfold from a rate on, which is another one for each policy."""
    limits = dict(zip(BASELINES, (1.0, 2.0, 5.0, 3.0, 0.5), strict=True))
    for run in asked:
        ttft = 1.0 if run.rate <= limits[run.policy] else 10.0
        yield msgspec.structs.replace(summarise([], {}, range(1), 1.0, Goal()), ttft=spread([ttft]))


def test_the_knee_is_where_the_best_baseline_gives_in() -> None:
    said: list[str] = []
    asked: list[Run] = []

    def runs(given: Iterable[Run]) -> Iterator[Figures]:
        several = list(given)
        asked.extend(several)
        return fake(several)

    def run(policy: str, seed: int, rate: float) -> Run:
        return SMALL._replace(policy=policy, seed=seed, rate=rate)

    knee = Knee(run, BASELINES, (0, 1), runs, said.append).find()
    assert knee is not None
    assert 5.0 / 1.12 <= knee <= 5.0 * 1.12
    assert "round-robin keeps to" in said[-1] or "nobody keeps to" in said[-1]
    assert {one.seed for one in asked} == {0, 1}
    assert {one.most_ttft for one in asked} == {None, 2 * GROWTH}
    # Who failed at a rate is not asked at a greater one.
    affinity = [one.rate for one in asked if one.policy == "affinity" and one.most_ttft]
    assert max(affinity, default=0.0) <= 8.0


def test_what_stands_every_rate_has_no_knee() -> None:
    said: list[str] = []

    def unmoved(asked: Iterable[Run]) -> Iterator[Figures]:
        return fake([one._replace(rate=0.1) for one in asked])

    def run(policy: str, seed: int, rate: float) -> Run:
        return SMALL._replace(policy=policy, seed=seed, rate=rate)

    assert Knee(run, BASELINES, (0,), unmoved, said.append).find() is None
    assert said[-1].startswith(f"rate {FURTHEST:.3f}: overlap keeps to")


def knee_of_steps(a_second: float, folder: Path) -> Knee:
    """Of one worker that gets prompts that fill a step of 0.37 s each, so many a second by chance, and nothing else."""
    trace = folder / "t.jsonl"
    ids = [tuple(range(16 * number, 16 * number + 16)) for number in range(400)]
    rows = [Row(1000 / a_second * number, 8192, 1, blocks) for number, blocks in enumerate(ids)]
    trace.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows))

    def run(policy: str, seed: int, rate: float) -> Run:
        return Run(Requests(trace=str(trace), arrivals="poisson"), FleetSettings(workers=1), policy, seed, rate)

    return Knee(run, ("least-loaded",), (0, 1), partial(map, Run.figures), lambda _: None)


@pytest.mark.slow
def test_the_knee_of_a_fleet_is_a_little_below_what_it_can_do(tmp_path: Path) -> None:
    """It can do 2.7 a second, and at 0.8 of that TTFT is three times as long, in endless time (M/D/1)."""
    search = knee_of_steps(2, tmp_path)
    assert search.is_light()
    assert search.find() == pytest.approx(0.8 * 2.7 / 2, rel=0.2)


def test_there_is_no_knee_above_a_rate_that_is_too_much_already(tmp_path: Path) -> None:
    """What comes in seconds cannot wait much longer than it does at a tenth of that rate."""
    assert not knee_of_steps(100, tmp_path).is_light()
