from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from router.__main__ import main
from router.ab.statistics import Spread
from router.simulation.figures import Figures, Goal, summarise
from router.simulation.plan import BASELINES
from router.simulation.report import page, suite_row, verdicts
from router.simulation.run import Run
from router.simulation.suite import CASES, LOADS, Line, cases, find_knees, judge, run_suite, ttft_mean, ttft_p99
from router.simulation.workloads import WORKLOADS


def figures(mean: float) -> Figures:
    spread = Spread(mean, mean, mean, 2 * mean, 3 * mean)
    return msgspec.structs.replace(summarise([], {}, range(1), 1.0, Goal()), ttft=spread, tpot=spread, e2e=spread)


def line(workload: str, load: float, auto: float, best: float) -> Line:
    others = {policy: [figures(best * (1 + number))] for number, policy in enumerate(BASELINES)}
    found = {"auto": [figures(auto)], **others, "least-loaded": [figures(best * 2)]}
    return Line(workload, load, load, found, saturated=load > 0.8)


def test_every_workload_is_a_case_with_a_knee() -> None:
    assert [case.workload for case in CASES] == [name for name, kind in WORKLOADS.items() if kind.max_loras is None]
    assert all(case.knee > 0.1 and case.seconds <= WORKLOADS[case.workload].seconds for case in CASES)
    assert [case.workload for case in cases(("rag", "chat"))] == ["chat", "rag"]


def test_it_is_judged_by_saturated_runs_and_by_the_worst() -> None:
    lines = [line("chat", 0.6, 1.0, 1.0), line("chat", 0.9, 0.8, 1.0), line("chat", 1.1, 1.2, 2.0)]
    verdict = judge(
        [one._replace(figures={k: v for k, v in one.figures.items() if k != "least-loaded"}) for one in lines]
    )
    assert verdict.saturated == pytest.approx(0.7)
    assert verdict.worst == 1.0
    assert math.isnan(verdict.no_reuse)
    assert judge([*lines, line("no-reuse", 0.6, 2.2, 1.0)]).no_reuse == pytest.approx(1.1)


def test_nothing_is_judged_by_runs_that_were_not_made() -> None:
    bare = line("large-fleet", 0.9, 1.0, 1.0)._replace(saturated=False)
    del bare.figures["least-loaded"]
    assert verdicts([bare]) == ["all runs, worst auto/best: 1.000, goal 1.05"]
    assert "nan" not in page([bare], "a command")


def test_best_is_the_best_of_that_very_run() -> None:
    one = line("chat", 0.9, 1.0, 2.0)
    one.figures["affinity"] = [figures(0.5)]
    assert one.best(ttft_mean) == one.best(ttft_p99) == "affinity"
    assert one.ratio(ttft_mean) == 2.0
    slow = Spread(4.0, 4.0, 4.0, 4.0, 4.0)
    one.figures["affinity"] = [msgspec.structs.replace(figures(0.5), tpot=slow, e2e=slow)]
    one.figures["round-robin"] = [msgspec.structs.replace(figures(9.0), tpot=Spread(0.8, 1.0, 1.0, 1.0, 1.0))]
    assert suite_row(one) == ("chat", "0.9", "0.90", "1.000", "0.500 affinity", "2.00", "2.00", "1.25", "0.50")


def test_means_are_over_seeds() -> None:
    one = line("chat", 0.9, 1.0, 2.0)
    one.figures["auto"] = [figures(1.0), figures(3.0)]
    assert one.mean("auto", ttft_mean) == 2.0


def fake(runs: Iterable[Run]) -> Iterator[Figures]:
    return (figures(run.rate) for run in runs)


def test_each_case_runs_below_and_above_its_knee() -> None:
    chosen = cases(("chat", "no-reuse"))
    lines = list(run_suite(chosen, (0, 1), fake))
    assert [(one.workload, one.load) for one in lines] == [(case.workload, load) for case in chosen for load in LOADS]
    assert [one.rate for one in lines[:3]] == [pytest.approx(load * chosen[0].knee) for load in LOADS]
    assert {len(several) for one in lines for several in one.figures.values()} == {2}
    assert [one.saturated for one in lines[:3]] == [False, True, True]
    assert not any(one.saturated for one in run_suite(cases(("large-fleet",)), (0,), fake))
    assert lines[0].control is None
    assert lines[3].control == 1.0


def test_knees_are_found_anew() -> None:
    (found,) = find_knees(cases(("chat",)), (0,), fake, lambda _: None)
    assert found.knee == pytest.approx(0.3, rel=0.12)  # here TTFT is the rate, and thrice that at a tenth is allowed
    (found,) = find_knees(cases(("chat",)), (0,), lambda runs: (figures(1.0) for _ in runs), lambda _: None)
    assert (found.knee, found.saturates) == (2.0, False)


def test_the_page_has_a_row_for_each_run() -> None:
    lines = [line("chat", 0.6, 1.0, 1.0), line("chat", 0.9, 0.8, 1.0)]
    text = page(lines, "python -m router simulate --suite")
    assert "| chat | 0.9 | 0.90 | 0.800 | 1.000 overlap | 0.80 | 0.80 | 0.80 | 0.80 |" in text
    assert all(words in text for words in verdicts(lines))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    short = tuple(case._replace(seconds=0.3) for case in CASES)
    monkeypatch.setattr("router.simulation.suite.CASES", short)
    out, told = tmp_path / "suite.json", tmp_path / "page.md"
    flags = ["--suite", "--workload", "no-reuse,hot-prompt", "--jobs", "1", "--out", str(out), "--page", str(told)]
    assert main(["simulate", *flags]) == 0
    assert "goal 0.85" in capsys.readouterr().out
    assert len(json.loads(out.read_bytes())["lines"]) == 6
    assert "--suite --workload no-reuse,hot-prompt" in told.read_text("utf-8")
