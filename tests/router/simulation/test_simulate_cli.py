from __future__ import annotations

import json
import os
import re
import select
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from publishers.streams import open_standard_streams
from router.__main__ import main
from router.ab.errors import RunError
from router.ab.flags import check_writable
from router.simulation.changes import parse_change
from router.simulation.figures import Figures
from router.simulation.plan import POLICIES, Plan, make_parser, read_plan
from router.simulation.run import Run
from router.simulation.suite import CASES
from router.simulation.workloads import WORKLOADS
from tests.fakes.full_stream import FullStream
from tests.fakes.unread import run_unread

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "simulate.md").read_text("utf-8")
STORE = ROOT / "configs" / "store-simulation.yaml"
SMALL = ["--workload", "rag", "--duration", "2", "--jobs", "1"]


def plan(text: str) -> Plan:
    return read_plan(shlex.split(text))


def test_policies_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sim [new].json"
    flags = ["--policies", "auto,round-robin", "--seeds", "0,1", "--sweep", "0.5,1", "--out", str(out)]
    assert main(["simulate", *SMALL, *flags]) == 0
    told = capsys.readouterr().out
    assert f"Written to {out}" in told
    for words in (
        "TTFT s mean",
        "goodput /s",
        "rate 0.5",
        "rate 1,",
        "±",
        "×)",
        "In brackets: the ratio to round-robin.",
    ):
        assert words in told
    report = json.loads(out.read_bytes())
    assert [(run["rate"], run["policy"], run["seed"]) for run in report["runs"]] == [
        (rate, policy, seed) for rate in (0.5, 1.0) for policy in ("auto", "round-robin") for seed in (0, 1)
    ]
    assert report["command"][:2] == ["kv-router", "simulate"]
    assert report["settings"]["requests"]["workload"] == "rag"


def test_a_change_that_comes_too_late_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """The faster the same requests come, the sooner it is all over."""
    flags = ["--policies", "auto,random", "--change", "1:kill:0", "--change", "14:join:1", "--sweep", "0.1,2"]
    assert main(["simulate", *SMALL, *flags]) == 0
    told = capsys.readouterr().out.split("rate 2, ")
    late = r"All was over in second [45]\.\d\. Nothing came of --change in second 14\.\n"
    assert "All was over" not in told[0]
    assert len(re.findall(late, told[1])) == 1


def test_the_heading_counts_the_requests_of_every_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sim.json"
    assert main(["simulate", *SMALL, "--policies", "auto", "--seeds", "0,1,2", "--out", str(out)]) == 0
    counts = [run["figures"]["requests"] for run in json.loads(out.read_bytes())["runs"]]
    assert min(counts) < max(counts)
    assert f"rate 1, {min(counts)} to {max(counts)} requests" in capsys.readouterr().out


@pytest.fixture
def interrupted_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C after so many runs."""

    def interrupt(runs: int) -> None:
        made, figures = count(), Run.figures

        def figures_or_interrupt(run: Run) -> Figures:
            if next(made) == runs:
                raise KeyboardInterrupt
            return figures(run)

        monkeypatch.setattr(Run, "figures", figures_or_interrupt)

    return interrupt


def test_what_was_complete_when_interrupted_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupted_after: Callable[[int], None]
) -> None:
    """The second rate lacks the baseline's second seed, and a policy."""
    out = tmp_path / "sim.json"
    flags = ["--policies", "auto,overlap,random", "--seeds", "0,1", "--sweep", "0.5,1,2", "--out", str(out)]
    interrupted_after(9)
    assert main(["simulate", *SMALL, *flags]) == 130
    told, said = capsys.readouterr()
    assert said == "kv-router simulate: interrupted; what was complete is reported\n"
    whole, partial = told.split("rate 1, ")
    assert "runs" not in whole
    assert re.match(r"\d+ to \d+ requests, 3 of 6 runs\n", partial)
    assert ("overlap" in partial, "random" in partial) == (True, False)
    assert "×)" in partial
    assert "rate 2" not in told
    assert "In brackets: the ratio to overlap." in told
    report = json.loads(out.read_bytes())
    assert len(report["runs"]) == 9
    assert report["complete"] is False


def test_without_a_complete_run_nothing_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupted_after: Callable[[int], None]
) -> None:
    interrupted_after(0)
    assert main(["simulate", *SMALL, "--out", str(tmp_path / "sim.json")]) == 130
    assert capsys.readouterr() == ("", "kv-router simulate: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_policies_that_were_complete_before_the_baseline_have_no_ratio(
    capsys: pytest.CaptureFixture[str], interrupted_after: Callable[[int], None]
) -> None:
    interrupted_after(1)
    assert main(["simulate", *SMALL, "--policies", "auto,overlap"]) == 130
    told = capsys.readouterr().out
    assert ("auto" in told, "×)" in told, "In brackets" in told) == (True, False, False)


def test_an_interrupted_suite_has_a_table_and_no_page(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    interrupted_after: Callable[[int], None],
) -> None:
    monkeypatch.setattr("router.simulation.suite.CASES", tuple(case._replace(seconds=0.3) for case in CASES))
    out, page = tmp_path / "suite.json", tmp_path / "suite.md"
    flags = ["--suite", "--workload", "hot-prompt", "--jobs", "1", "--out", str(out), "--page", str(page)]
    interrupted_after(len(POLICIES))
    assert main(["simulate", *flags]) == 130
    told = capsys.readouterr().out
    assert ("auto/best" in told, "goal" in told) == (True, False)
    assert len(json.loads(out.read_bytes())["lines"]) == 1
    assert not page.exists()


def test_an_interrupted_store_sweep_has_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupted_after: Callable[[int], None]
) -> None:
    out = tmp_path / "credit.json"
    store = ["--store-tokens", "500000", "--store-sweep", "1,20", "--policies", "auto", "--out", str(out)]
    interrupted_after(2)
    assert main(["simulate", *SMALL, *store]) == 130
    told = capsys.readouterr().out
    assert ("with credit" in told, "goal" in told) == (True, False)
    assert len(json.loads(out.read_bytes())["credit"]) == 1


def test_a_trace_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # else a reader would wait for one
    try:
        with pytest.raises(RunError, match=f"the trace {pipe} is a pipe"):
            plan(f"--trace {pipe}")
    finally:
        os.close(writer)


def test_who_reads_a_named_pipe_is_not_sent_away_before_the_run(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader, waiting = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), select.poll()
    try:
        waiting.register(reader)
        check_writable("--out", str(pipe))
        assert waiting.poll(0) == [], "somebody wrote to it, and closed it"
    finally:
        os.close(reader)


def test_what_is_read_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whichever of its names."""
    trace, flags, link = tmp_path / "trace.jsonl", tmp_path / "flags.yaml", tmp_path / "link"
    trace.write_text("a trace")
    flags.write_text(f"trace: {trace}\n")
    os.link(trace, link)
    assert main(["simulate", "--flags", str(flags), "--out", str(link)]) == 2
    assert capsys.readouterr().err.endswith("--trace and --out name the same file; give each its own\n")
    assert main(["simulate", "--flags", str(flags), "--out", f"{tmp_path}/./flags.yaml"]) == 2
    assert capsys.readouterr().err.endswith("--flags and --out name the same file; give each its own\n")
    assert trace.read_text() == "a trace"


def test_a_link_to_a_file_that_is_not_there_yet_leaves_none_before_the_run(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    check_writable("--out", str(link))
    assert link.is_symlink()
    assert not target.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--limit", "5", "--policies", "auto", "--out", "/dev/full"]) == 2
    assert capsys.readouterr().err == "kv-router simulate: cannot write /dev/full: No space left on device\n"


def test_what_nobody_can_read_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is closed; what goes into a file is not lost."""
    out = tmp_path / "sim.json"
    monkeypatch.setattr(sys, "stdout", None)
    open_standard_streams()
    with closing(sys.stdout):
        assert main(["simulate", *SMALL, "--limit", "5", "--policies", "auto", "--out", str(out)]) == 1
    sys.stdout.close()
    said = "kv-router simulate: standard output is closed, and what was to be shown there lost\n"
    assert capsys.readouterr().err == said
    assert json.loads(out.read_bytes())["complete"]


def test_what_is_printed_to_a_full_disk_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sim.json"
    monkeypatch.setattr(sys, "stdout", FullStream())
    assert main(["simulate", *SMALL, "--limit", "5", "--policies", "auto", "--sweep", "1,2", "--out", str(out)]) == 1
    sys.stdout.close()
    assert capsys.readouterr().err == "kv-router simulate: No space left on device\n"
    assert len(json.loads(out.read_bytes())["runs"]) == 2


@pytest.mark.slow
def test_a_reader_that_goes_away_costs_no_result(tmp_path: Path) -> None:
    out = tmp_path / "sim.json"
    argv = ["simulate", *SMALL, "--limit", "5", "--policies", "auto", "--sweep", "1,2", "--out", str(out)]
    assert run_unread("router", argv) == (1, "kv-router simulate: Broken pipe\n")
    assert len(json.loads(out.read_bytes())["runs"]) == 2


def test_the_same_seed_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    told = [main(["simulate", *SMALL, "--policies", "auto"]) or capsys.readouterr().out for _ in range(2)]
    assert told[0] == told[1]


def test_a_knee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "knee.json"
    assert main(["simulate", *SMALL, "--workers", "1", "--knee", "--out", str(out)]) == 0
    assert "The knee is at rate" in capsys.readouterr().out
    assert json.loads(out.read_bytes())["knee"] > 0.1


def test_no_knee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five requests on eight workers never wait; nor is one worker idle at a tenth of three hundred a second."""
    out = tmp_path / "knee.json"
    assert main(["simulate", *SMALL, "--limit", "5", "--knee", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "There is no knee up to rate 16" in told
    assert "The knee is at" not in told
    assert json.loads(out.read_bytes())["knee"] is None
    crowd = ["--workload", "hot-prompt", "--duration", "2", "--jobs", "1", "--workers", "1", "--prefill-tokens-per-s"]
    assert main(["simulate", *crowd, "500", "--knee"]) == 2
    assert "requests wait for each other at rate 0.1 already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--workload none", "--workload takes one of chat"),
        ("--workload chat,rag", "with --suite several"),
        ("--suite --workload ,", "--workload takes one of chat"),
        ("--change 3:kill:8 --change 3:join:1", "no worker 8 then"),
        ("--workload chat --trace synthetic", "exclude each other"),
        ("--trace /nowhere", "cannot read the trace /nowhere: No such file or directory"),
        ("--trace /", "cannot read the trace /: Is a directory"),
        ("--policies fastest", "there is no policy 'fastest'"),
        ("--baseline random", "the baseline random is not among the policies"),
        (
            "--block-size 24 --limit 1",
            "must divide 512, the tokens that one hash id stands for, or be a multiple of it",
        ),
        ("--slow 8=2", "only 8 workers"),
        ("--change 3:kill:8", "no worker 8 then"),
        ("--change 3:kill:x", "argument --change: it takes T:slow:INDEX=FACTOR, T:kill:INDEX, T:drain:INDEX or T:join"),
        ("--change 5:foo", "argument --change: it takes T:slow:INDEX=FACTOR, T:kill:INDEX, T:drain:INDEX or T:join"),
        (
            "--suite --rate 2 --policies lmetric",
            "has its own traffic, fleets and policies; leave out --policies, --rate",
        ),
        ("--suite --knee --no-reuse --prefill 1", "leave out --no-reuse, --prefill"),
        (
            "--knee --sweep 1,2 --policies kv",
            "--knee tries rates and policies of its own, and refuses nothing; leave out --policies, --sweep",
        ),
        ("--knee --rate 2 --baseline kv", "leave out --baseline, --rate"),
        ("--sweep 1,2 --rate 3", "--sweep has rates of its own; leave out --rate"),
        ("--knee --goal-ttft 1", "--knee tells no goodput; leave out --goal-ttft"),
        ("--kv-bytes-per-token 9", "--store-tokens or --host-tokens no KV is moved; leave out --kv-bytes-per-token"),
        ("--knee --ttft-slo 1 --slo-action queue", "and refuses nothing; leave out --slo-action, --ttft-slo"),
        (
            "--duration 1 --jobs 1 --store-tokens 1000 --store-sweep 1 --sweep 1,2 --no-store-credit --store-gb-s 7",
            "with and without credit, at one --rate; leave out --no-store-credit, --store-gb-s, --sweep",
        ),
        (
            "--push --transfer-gb-s 5",
            "without --prefill no request is served in two parts; leave out --push, --transfer-gb-s",
        ),
        (
            "--store-ttl 5 --no-store-credit",
            "without --store-tokens there is no store; leave out --no-store-credit, --store-ttl",
        ),
        (
            "--slo-action queue",
            "without --ttft-slo or --tbt-slo there is no objective; leave out --slo-action",
        ),
        ("--page suite.md", "--page is of --suite, without --knee"),
        (
            "--slow 0=inf",
            "argument --slow: it takes INDEX=FACTOR, such as 0=2, with a FACTOR of 10000 at most, not '0=inf'",
        ),
        ("--change nan:kill:0", "argument --change: it takes T:slow:INDEX=FACTOR"),
        ("--change 1:slow:0=nan", "argument --change: it takes T:slow:INDEX=FACTOR"),
        ("--prefill-tokens-per-s 0", "--prefill-tokens-per-s must be a number above 0"),
        ("--base-s nan", "--base-s must be a number of seconds, not below 0"),
        ("--slow 0=1e300", "argument --slow: it takes INDEX=FACTOR, such as 0=2, with a FACTOR of 10000 at most, not"),
        ("--change 1:slow:0=1e300", "in which FACTOR is 10000 at most, not '1:slow:0=1e300'"),
        ("--rate 1e-9 --duration 5 --jobs 1", "the last request comes in second"),
        ("--slow 1", "argument --slow: it takes INDEX=FACTOR, such as 0=2, with a FACTOR of 10000 at most, not '1'"),
        ("--rate 0", "0 is not above 0"),
        ("--limit 0", "0 is not at least 1"),
        ("--seeds x", "argument --seeds: it takes a whole number, not 'x'"),
        ("--rate x", "argument --rate: it takes a number, not 'x'"),
        ("--workers 1 --cache-tokens 64 --duration 1 --jobs 1", "does not fit a cache of 64"),
        ("--out /nowhere/x.json", "cannot write /nowhere/x.json"),
        ("--duration 1 --workers 1 --jobs 1 --out /dev/full", "cannot write /dev/full: No space left on device"),
        ("--suite --out x --page x", "--out and --page name the same file; give each its own"),
        ("--suite --out x --page ./x", "--out and --page name the same file; give each its own"),
    ],
)
def test_what_cannot_be_run_is_told(flags: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *shlex.split(flags)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kv-router simulate: ")
    assert complaint in error


def test_a_workload_brings_its_fleet_unless_told_otherwise() -> None:
    own = plan("--workload mixed-hardware").fleet
    assert (own.workers, own.slow) == (8, WORKLOADS["mixed-hardware"].slow)
    assert plan("--workload mixed-hardware --slow 1=4 --workers 4").fleet.slow == {1: 4.0}
    assert plan("--workload small-caches").fleet.cache_tokens == 65_536
    assert plan("--workload small-caches --cache-tokens 131072").fleet.cache_tokens == 131_072
    assert plan("--trace synthetic").fleet.workers == 8
    assert plan("--base-s 0.02").fleet.timing.base_s == 0.02


def test_settings_reach_a_run() -> None:
    run = plan("--ttft-slo 1 --tbt-slo 0.1 --slo-action queue --slo-patience 3 --goal-ttft 4 --no-reuse").run(
        "kv", 3, 2.0
    )
    assert run.slo == (1.0, 0.1, "queue", 3.0)
    assert run.goal == (4.0, 0.1)
    assert not run.requests.reuse
    assert (run.policy, run.seed, run.rate) == ("kv", 3, 2.0)


def test_the_baseline_is_the_first_that_is_not_judged() -> None:
    assert plan("").baseline == "overlap"
    assert plan("--policies auto,random").baseline == "random"
    assert plan("--policies auto").baseline == "auto"


def test_every_flag_is_on_the_page_and_no_other() -> None:
    flags = {flag for action in make_parser()._actions for flag in action.option_strings if flag.startswith("--")}
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE))
    assert flags - {"--help"} == told - {"--kv-policy"}


def test_the_pages_examples_are_read() -> None:
    examples = re.findall(r"^python -m router simulate (.*)$", PAGE, re.MULTILINE)
    assert len(examples) >= 5
    for example in (text.replace("configs/", f"{ROOT}/configs/") for text in examples):
        if "conversation_trace" in example:
            with pytest.raises(RunError, match="cannot read the trace"):
                plan(example)
        else:
            plan(example)


def test_help_names_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    told = capsys.readouterr().out.replace("\n", "").replace(" ", "")
    assert all(name in told for name in WORKLOADS)


def test_flags_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "workers: 4\nseeds: [0, 1]\nprefill: 1\ndecode: 1\npush: true\nno-reuse: false\nslow: 1=2.5\n", "utf-8"
    )
    own = plan(f"--flags {file} --workers 3")
    assert (own.fleet.workers, own.seeds, own.fleet.push, own.fleet.slow) == (3, (0, 1), True, {1: 2.5})


def test_a_list_in_a_file_repeats_what_takes_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("slow: [0=2, 1=3]\nchange: ['1:kill:0', '2:join:1']\nseeds: [0, 1]\n", "utf-8")
    own = plan(f"--flags {file}")
    assert own.fleet.slow == {0: 2.0, 1: 3.0}
    assert own.changes == (parse_change("1:kill:0"), parse_change("2:join:1"))
    assert own.seeds == (0, 1)


def test_the_stores_flags_reach_the_fleet() -> None:
    given = plan(
        f"--flags {STORE} --workload rag --store-eviction sieve --store-ttl 9 --store-base-s 0.5 --store-replicas 2"
    ).fleet
    assert (given.workers, given.store_tokens, given.store_eviction) == (16, 20_000_000, "sieve")
    assert (given.store_ttl_s, given.store_base_s, given.store_credit) == (9.0, 0.5, True)
    assert given.store_replicas == 2
    small = plan("--store-tokens 5 --store-gb-s 3 --no-store-credit").fleet
    assert (small.store_tokens, small.store_gb_s, small.store_ttl_s, small.store_credit) == (5, 3.0, None, False)
    assert plan("").fleet.store_tokens == 0


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("workers: [", "flags.yaml is not valid YAML, line 1: expected the node content, but found '<stream end>'$"),
        ("workers: 1\nworkers: 2", "flags.yaml is not valid YAML, line 2: 'workers' is given twice$"),
        ("duration: 2001-99-99", "is not valid YAML: month must be in 1..12$"),
        ("duration: !!bool x", "is not valid YAML"),
        ("duration: !!timestamp x", "is not valid YAML"),
        ("duration: " + "[" * 1000, "is not valid YAML"),
        ("- workers", "must map flags to values"),
        ("workers: {}", "workers must be a flag's value"),
        ("workers:", "workers must be a flag's value"),
        ("flags: other.yaml", "flags must be a flag's value"),
        ("labourers: 3", "flags.yaml: unrecognized arguments: --labourers 3"),
        ("workers: many", "flags.yaml: argument --workers: it takes a whole number, not 'many'"),
        ("kv-events: false", "flags.yaml: unrecognized arguments: --kv-events"),
        ("rate: false", "flags.yaml: argument --rate: expected one argument"),
    ],
)
def test_a_flags_file_that_cannot_be_used_is_told(content: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text(content, "utf-8")
    with pytest.raises(RunError, match=complaint):
        plan(f"--flags {tmp_path / 'flags.yaml'}")


def test_a_flags_file_that_is_not_there_is_told() -> None:
    for given, complaint in {"--flags /nowhere": "cannot read /nowhere", "--flags": "expected one argument"}.items():
        with pytest.raises(RunError, match=complaint):
            plan(given)


def test_what_credit_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "credit.json"
    store = ["--store-tokens", "500000", "--store-sweep", "1,20", "--workers", "3", "--policies", "auto,overlap"]
    assert main(["simulate", *SMALL, *store, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "with/without credit, worst speed" in told
    lines = json.loads(out.read_bytes())["credit"]
    assert [(line["gb_s"], line["policy"]) for line in lines] == [
        (gb_s, policy) for gb_s in (1, 20) for policy in ("auto", "overlap")
    ]
    with pytest.raises(RunError, match="needs a store"):
        plan("--store-sweep 1")


def test_a_store_has_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--policies", "auto", "--store-tokens", "100000"]) == 0
    assert "store hits %" in capsys.readouterr().out
    assert main(["simulate", *SMALL, "--policies", "auto"]) == 0
    assert "store hits" not in capsys.readouterr().out
