from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console

from router.ab.client import Outcome
from router.ab.figures import ratios
from router.ab.machine import Cost
from router.ab.plan import Plan
from router.ab.progress import progress
from router.ab.report import ModeReport, Report, comparison, show, warnings
from router.ab.statistics import Record, summarise
from router.page.html import page

IDLE = Cost(wall=60.0, generator_cpu=5.0, children_cpu=40.0, machine_cpu=50.0, cores=2, chunks=1000)


def made(ttft: float = 1.0, *, cached: int = 40, lag: float = 0.0, error: str = "") -> Record:
    times = {"ttft": None, "tpot": None, "e2e": None} if error else {"ttft": ttft, "tpot": 0.01, "e2e": ttft + 1}
    return Record(
        0, 0.0, lag, 200, error, "a", **times, prompt_tokens=100, cached_tokens=cached, output_tokens=5, chunks=6
    )


def told(
    *records: Record, cost: Cost = IDLE, refused: tuple[str, ...] = (), simulated: bool = True, no_reuse: bool = False
) -> str:
    workers, speedup = ((), 4) if simulated else (("http://w",), 1)
    plan = Plan(trace="", modes=(), baseline="", workers=workers, speedup=speedup, no_reuse=no_reuse)
    return "; ".join(warnings(records, [5], summarise(records, 1), cost, refused, plan))


def report(**modes: Record) -> Report:
    return series({1.0: modes})


def series(
    rates: Mapping[float, Mapping[str, Record]], seeds: Sequence[int] = (0,), slo: float | None = None
) -> Report:
    """Every mode's only record, at every rate; TTFT is a second more with each seed."""
    *_, baseline = next(iter(rates.values()))
    made = tuple(
        mode_report(name, rate, seed, modes, baseline, slo)
        for rate, modes in rates.items()
        for seed in seeds
        for name in modes
    )
    return Report(
        command=("kv-router", "ab", "--modes", "kv, x"),
        started="2026-01-01T00:00:00+00:00",
        versions={"python": "3.11"},
        settings={"speedup": 4.0, "ttft_slo": slo, "rates": [1.0], "out": None},
        trace={"requests": 1, "seconds": 2.0, "input_tokens": 100, "output_tokens": 5, "reuse": 0.25},
        baseline=baseline,
        modes=made,
    )


def mode_report(
    name: str, rate: float, seed: int, modes: Mapping[str, Record], baseline: str, slo: float | None
) -> ModeReport:
    later = {
        mode: msgspec.structs.replace(one, ttft=None if one.ttft is None else one.ttft + seed)
        for mode, one in modes.items()
    }
    summaries = {mode: summarise([one], 2, slo) for mode, one in later.items()}
    return ModeReport(
        mode=name,
        rate=rate,
        seed=seed,
        workers=2,
        summary=summaries[name],
        cost=IDLE,
        warnings=("beware [of] brackets",),
        ratios=ratios(summaries[name], summaries[baseline]),
        requests=(later[name],),
    )


def test_ratios_compare_with_the_baseline() -> None:
    found = ratios(summarise([made(1.0)], 1), summarise([made(4.0, cached=20)], 1))
    assert found["TTFT s mean"] == 0.25
    assert found["cached prompt tokens %"] == 2.0
    assert "errors" not in found


def test_a_ratio_to_nothing_is_none() -> None:
    found = ratios(summarise([made(error="x")], 1), summarise([made(cached=0)], 1))
    assert found["TTFT s mean"] is None
    assert found["cached prompt tokens %"] is None


def test_the_json_holds_settings_summaries_and_rows() -> None:
    found = json.loads(report(kv=made(1.0), random=made(error="x")).encode())
    kv, other = found["modes"]
    assert found["settings"]["speedup"] == 4.0
    assert (kv["mode"], kv["summary"]["ttft"]["p99"], kv["requests"][0]["ttft"]) == ("kv", 1.0, 1.0)
    assert other["summary"]["ttft"]["mean"] is None


def test_the_table_says_units_ratios_and_warnings() -> None:
    stream = io.StringIO()
    show(report(kv=made(1.0), random=made(4.0)), Console(file=stream, width=120))
    text = stream.getvalue()
    assert "1.000 (0.25×)" in text
    assert "4.000 " in text
    assert "wall time × 4" in text
    assert "warning kv: beware [of] brackets" in text


def test_without_the_baseline_or_another_mode_no_ratio_is_told_of() -> None:
    whole = report(kv=made(1.0), other=made(2.0), random=made(4.0))
    for kept in (("kv", "other"), ("random",)):
        partial = msgspec.structs.replace(whole, modes=tuple(mode for mode in whole.modes if mode.mode in kept))
        stream = io.StringIO()
        show(partial, Console(file=stream, width=120))
        assert ("wall time × 4" in stream.getvalue(), "its ratio" in page(comparison(partial))) == (True, False)
        assert "the ratio" not in stream.getvalue()


def test_seconds_of_real_engines_are_not_called_simulated() -> None:
    made_up = report(kv=made(1.0), random=made(4.0))
    real = msgspec.structs.replace(made_up, settings=made_up.settings | {"speedup": 1.0, "workers": ["http://w"]})
    stream = io.StringIO()
    show(real, Console(file=stream, width=120))
    assert "simulated" not in stream.getvalue().lower()
    assert stream.getvalue().lower().count("seconds are real") == 2
    assert comparison(real).times == "Seconds are real."


def test_several_rates_and_seeds() -> None:
    """Means over seeds, a table for each rate, warnings that say of which run."""
    stream = io.StringIO()
    modes = {"kv": made(1.0), "random": made(3.0)}
    show(series({1.0: modes, 2.0: modes}, seeds=(0, 2)), Console(file=stream, width=150))
    text = stream.getvalue()
    assert text.count("TTFT s mean") == 2
    assert "rate 2" in text
    assert "2.000 ±12.706 (0.45× 0.01–" in text  # TTFTs of 1 and 3 s over 3 and 5 s
    assert "at the first of rates 1, 2 and seeds 0, 2" in text
    assert "warning random at rate 2, seed 2: beware" in text


def test_seeds_that_disagree_make_no_ratio_of_many_digits() -> None:
    stream = io.StringIO()
    show(series({1.0: {"kv": made(0.001), "random": made(3.0)}}, seeds=(0, 400)), Console(file=stream, width=150))
    assert "–>9999)" in stream.getvalue()


def test_a_seed_is_told_to_its_last_digit() -> None:
    assert "seeds 20261126, 20261127)" in comparison(series({1.0: {"kv": made()}}, seeds=(20261126, 20261127))).about


def test_a_short_load_does_not_last_no_time() -> None:
    made_up = report(kv=made())
    short = msgspec.structs.replace(made_up, trace=made_up.trace | {"seconds": 0.432})
    assert comparison(short).about.startswith("1 requests in 0.43 s, ")
    long = msgspec.structs.replace(made_up, trace=made_up.trace | {"seconds": 1234.5})
    assert comparison(long).about.startswith("1 requests in 1234 s, ")


def test_the_page_leaves_out_settings_that_are_empty() -> None:
    plan = Plan(trace="synthetic", modes=("kv", "none"), baseline="none")
    made_up = msgspec.structs.replace(report(kv=made()), settings=msgspec.to_builtins(plan))
    settings = dict(comparison(made_up).facts)["settings"]
    assert "modes kv none" in settings
    assert not [name for name in ("workers", "peers", "sim_args", "router_args") if f" {name} " in f" {settings} "]


def test_a_comparison_has_all_that_a_page_shows() -> None:
    found = comparison(series({1.0: {"kv": made(1.0), "random": made(3.0)}}, slo=2.0))
    assert (found.policies, found.rates, found.seeds, found.baseline) == (["kv", "random"], [1.0], [0], "random")
    kv, other = found.results
    assert (kv.values["within TTFT SLO %"], other.values["within TTFT SLO %"]) == (100, 0)
    assert (kv.ttft, kv.imbalance) == ([1.0], [(0.0, 2.0)])
    assert kv.busy == (IDLE.busy, IDLE.own_busy)
    facts = dict(found.facts)
    assert facts["command"] == "kv-router ab --modes 'kv, x'"
    assert facts["machine"] == "2 cores, 42% to 42% busy during the runs"
    assert facts["settings"] == "speedup 4.0, ttft_slo 2.0, rates 1.0"
    shown = {figure.title for figure in found.figures}
    assert {"goodput, requests / s", "errors"} <= shown
    assert "goodput, requests / s" not in {figure.title for figure in comparison(report(kv=made())).figures}


def test_a_table_of_errors_has_dashes() -> None:
    stream = io.StringIO()
    show(report(kv=made(error="x"), random=made(error="x")), Console(file=stream, width=120))
    assert "–" in stream.getvalue()
    assert "nan" not in stream.getvalue()


def test_a_sound_run_has_no_warning() -> None:
    assert told(made()) == ""


def test_warnings() -> None:
    assert "2 of 3 requests failed; the first: x" in told(made(), made(error="x"), made(error="y"))
    short = msgspec.structs.replace(made(), output_tokens=3)
    assert "1 of 2 answers were shorter than asked, the first with 3 of 5 tokens" in told(made(), short)
    assert "was late by 0.200 s" in told(made(lag=0.2))
    assert "92% busy, 92% by this run" in told(made(), cost=Cost(60.0, 10.0, 100.0, None, 2, 1))
    assert "http://w would not empty the prefix cache" in told(made(), refused=("http://w",))
    assert "--enable-prompt-tokens-details" in told(made(cached=0), simulated=False)
    assert told(made(cached=0)) == ""
    assert told(made(cached=0), simulated=False, no_reuse=True) == ""


def test_a_generator_that_is_late_by_itself_is_told_of_a_flag_that_helps() -> None:
    assert "lower --speedup" in told(made(lag=0.2))
    assert "lower --rates" in told(made(lag=0.2), simulated=False)


def test_a_crowded_machine_is_seen_though_this_run_is_modest() -> None:
    crowded = msgspec.structs.replace(IDLE, machine_cpu=119.0)
    told_so = told(made(), cost=crowded)
    assert "not to be trusted: this machine was 99% busy, 38% by this run" in told_so
    assert "run it on an idle machine" in told_so
    # TTFT grows with the crowd; lateness must not be measured against it alone.
    assert "was late by 4.800 s" in told(made(79.0, lag=4.8), cost=crowded)


def test_busy_without_a_wall() -> None:
    assert Cost(0.0, 1.0, 1.0, 1.0, 2, 0).busy == 0.0
    assert math.isclose(IDLE.busy, 50 / 120)
    assert math.isclose(IDLE.own_busy, 45 / 120)
    assert msgspec.structs.replace(IDLE, machine_cpu=None).busy == IDLE.own_busy


def test_progress_in_plain_lines() -> None:
    stream = io.StringIO()
    with progress(Console(file=stream, width=120), "kv", 20) as advance:
        for index in range(20):
            advance(Outcome(0.0, error="x" if index == 4 else ""))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "kv: 2 of 20 requests done, 0 errors"
    assert lines[-1] == "kv: 20 of 20 requests done, 1 errors"


def test_progress_at_a_terminal() -> None:
    stream = io.StringIO()
    with progress(Console(file=stream, width=120, force_terminal=True), "kv", 2) as advance:
        advance(Outcome(0.0))
        advance(Outcome(0.0, error="x"))
    assert "2/2" in stream.getvalue()
    assert "1 errors" in stream.getvalue()
