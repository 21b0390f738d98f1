"""The settings of a simulation, read from its command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, get_args

import msgspec

from engines.sim.store import Eviction
from engines.sim.timing import HELP as TIMING_HELP
from engines.sim.timing import StepTiming
from router.ab.arrivals import Arrivals
from router.ab.errors import RunError
from router.ab.flags import Parser, check_distinct, count, number, positive, taking, whole
from router.ab.trace_file import FORMATS, check_readable, file_of
from router.scheduling.admission import SloAction
from router.simulation.changes import SLOWEST, Change, parse_change, parse_slow, unknown_worker
from router.simulation.figures import Goal
from router.simulation.flags_file import with_flags_file
from router.simulation.fleet import FleetSettings
from router.simulation.run import Run, Slo, find_policy
from router.simulation.source import Requests
from router.simulation.workloads import WORKLOADS

BASELINES = ("overlap", "lmetric", "round-robin", "power-of-two", "affinity")
POLICIES = ("auto", *BASELINES)

_DESCRIPTION = """\
Runs policies on a simulated fleet in virtual time: the router's own choices before the simulated engines' own model,
without HTTP. Each policy starts with empty caches. The same seed gives the same result."""

_T = TypeVar("_T")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    requests: Requests
    fleet: FleetSettings
    policies: tuple[str, ...]
    baseline: str
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    store_sweep: tuple[float, ...]
    """Speeds of the store, in GB/s."""
    slo: Slo
    changes: tuple[Change, ...]
    goal: Goal
    knee: bool
    suite: bool
    suite_workloads: tuple[str, ...]
    """Workloads to run; empty for all."""
    jobs: int
    out: str | None
    page: str | None

    def run(self, policy: str, seed: int, rate: float) -> Run:
        return Run(self.requests, self.fleet, policy, seed, rate, self.slo, self.changes, self.goal)


def read_plan(argv: Sequence[str]) -> Plan:
    """Raises RunError for flags that cannot be used; `--help` prints and raises SystemExit(0)."""
    parser = make_parser()
    given = parser.parse_args(with_flags_file(argv, parser))
    _refuse_of_other_studies(parser, given)
    _refuse_idle(parser, given)
    requests, policies = _requests(given), given.policies
    fleet = _fleet(given, requests)
    for policy in policies:
        find_policy(policy)
    baseline = _baseline(given)
    _check(given, fleet)
    return Plan(
        requests=requests,
        fleet=fleet,
        policies=policies,
        baseline=baseline,
        seeds=given.seeds,
        rates=given.sweep or (given.rate,),
        store_sweep=given.store_sweep or (),
        slo=Slo(given.ttft_slo, given.tbt_slo, given.slo_action, given.slo_patience),
        changes=tuple(given.change),
        goal=Goal(given.goal_ttft, given.goal_tpot),
        knee=given.knee,
        suite=given.suite,
        suite_workloads=tuple((given.workload or "").split(",")) if given.workload else (),
        jobs=given.jobs,
        out=given.out,
        page=given.page,
    )


_OF_SUITE = frozenset({"suite", "knee", "workload", "seeds", "jobs", "out", "page", "flags"})
_SLOS = frozenset({"ttft_slo", "tbt_slo", "slo_action", "slo_patience"})
"""Flags that the search for a knee refuses: requests that are rejected do not queue, so queues would not grow."""
_NOT_OF_KNEE = frozenset({"policies", "baseline", "rate", "sweep", "store_sweep"}) | _SLOS
_GOALS = frozenset({"goal_ttft", "goal_tpot"})
_NOT_OF_STORE_SWEEP = frozenset({"sweep", "baseline", "store_gb_s", "store_credit"})
_OF_PARTS = frozenset({"push", "transfer_gb_s", "transfer_base_s"})
_OF_STORE = frozenset({"store_gb_s", "store_base_s", "store_eviction", "store_ttl", "store_replicas", "store_credit"})
_OF_HOST = frozenset({"host_gb_s", "host_base_s", "disk_tokens"})
_OF_DISK = frozenset({"disk_gb_s", "disk_base_s"})
_OF_KV = frozenset({"kv_bytes_per_token"})
_OF_SLOS = frozenset({"slo_action", "slo_patience"})
_NEGATIVE = {"reuse": "no-reuse", "store_credit": "no-store-credit", "kv_events": "no-kv-events"}


def _refuse(parser: argparse.ArgumentParser, given: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuses flags that would be ignored."""
    others = [name for name in names if getattr(given, name) != parser.get_default(name)]
    flags = sorted("--" + _NEGATIVE.get(name, name.replace("_", "-")) for name in others)
    if flags:
        raise RunError(f"{why}; leave out {', '.join(flags)}")


def _refuse_of_other_studies(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.suite:
        _refuse(parser, given, vars(given).keys() - _OF_SUITE, "--suite has its own traffic, fleets and policies")
    elif given.knee:
        _refuse(parser, given, _NOT_OF_KNEE, "--knee tries rates and policies of its own, and refuses nothing")
        _refuse(parser, given, _GOALS, "--knee tells no goodput")
    elif given.store_sweep:
        why = "--store-sweep has its own speeds and compares with and without credit, at one --rate"
        _refuse(parser, given, _NOT_OF_STORE_SWEEP, why)


def _refuse_idle(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Flags of what is not there, or is said by another."""
    if given.sweep:
        _refuse(parser, given, ("rate",), "--sweep has rates of its own")
    if not given.prefill:
        _refuse(parser, given, _OF_PARTS, "without --prefill no request is served in two parts")
    if not given.store_tokens:
        _refuse(parser, given, _OF_STORE, "without --store-tokens there is no store")
    if not given.host_tokens:
        _refuse(parser, given, _OF_HOST, "without --host-tokens there is no second tier")
    if not given.disk_tokens:
        _refuse(parser, given, _OF_DISK, "without --disk-tokens there is no disk")
    if not (given.prefill or given.store_tokens or given.host_tokens):
        _refuse(parser, given, _OF_KV, "without --prefill, --store-tokens or --host-tokens no KV is moved")
    if given.ttft_slo is None and given.tbt_slo is None:
        _refuse(parser, given, _OF_SLOS, "without --ttft-slo or --tbt-slo there is no objective")


def _baseline(given: argparse.Namespace) -> str:
    policies: tuple[str, ...] = given.policies
    baseline = given.baseline or next((policy for policy in policies if policy not in {"auto", "kv"}), policies[0])
    if baseline not in policies:
        raise RunError(f"the baseline {baseline} is not among the policies {', '.join(policies)}; add it to --policies")
    return str(baseline)


def _check(given: argparse.Namespace, fleet: FleetSettings) -> None:
    """Flags that do not go together."""
    unknown = unknown_worker(fleet.workers, given.change)
    if unknown is not None:
        raise RunError(f"--change: there is no worker {unknown} then; workers are counted from 0")
    if given.page and (given.knee or not given.suite):
        raise RunError("--page is of --suite, without --knee")
    trace = file_of(given.trace) if given.trace else None
    check_distinct({"--flags": given.flags, "--trace": trace, "--out": given.out, "--page": given.page})
    if fleet.host_tokens and fleet.store_tokens:
        raise RunError("--host-tokens and --store-tokens exclude each other; give one")
    if given.store_sweep and not fleet.store_tokens:
        raise RunError("--store-sweep needs a store; give --store-tokens")


def _requests(given: argparse.Namespace) -> Requests:
    if given.workload and given.trace:
        raise RunError("--workload and --trace exclude each other; give one")
    workload = given.workload or (None if given.trace else "chat")
    names = workload.split(",") if workload else []
    if any(name not in WORKLOADS for name in names) or (len(names) > 1 and not given.suite):
        raise RunError(f"--workload takes one of {', '.join(WORKLOADS)}, not {workload!r}; with --suite several")
    if given.trace:
        check_readable(given.trace)
    first = names[0] if names else None
    return Requests(first, given.trace, given.duration, given.limit, given.arrivals, given.reuse)


def _fleet(given: argparse.Namespace, requests: Requests) -> FleetSettings:
    """The fleet: that of the workload, except where flags say otherwise."""
    kind, default = requests.kind, FleetSettings()
    workers = given.workers or (kind or default).workers
    slow = {**(kind.slow if kind else {}), **dict(given.slow)}
    if given.workers:
        slow = {index: factor for index, factor in slow.items() if index < workers or index in dict(given.slow)}
    if any(index >= workers for index in slow):
        raise RunError(f"--slow: there are only {workers} workers, counted from 0")
    if given.prefill + given.decode > workers or given.prefill == workers or given.decode > 0 == given.prefill:
        raise RunError(f"--prefill and --decode take a part of the {workers} workers each, and prefills need a decode")
    return FleetSettings(
        workers=workers,
        kv_events=given.kv_events,
        cache_tokens=given.cache_tokens or (kind or default).cache_tokens,
        block_size=given.block_size,
        slow=slow,
        timing=_timing(given),
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        max_loras=given.max_loras or (kind or default).max_loras,
        prefill=given.prefill,
        decode=given.decode,
        push=given.push,
        transfer_gb_s=given.transfer_gb_s,
        transfer_base_s=given.transfer_base_s,
        kv_bytes_per_token=given.kv_bytes_per_token,
        store_tokens=given.store_tokens,
        store_gb_s=given.store_gb_s,
        store_base_s=given.store_base_s,
        store_eviction=given.store_eviction,
        store_ttl_s=given.store_ttl,
        store_replicas=given.store_replicas,
        store_credit=given.store_credit,
        host_tokens=given.host_tokens,
        host_gb_s=given.host_gb_s,
        host_base_s=given.host_base_s,
        disk_tokens=given.disk_tokens,
        disk_gb_s=given.disk_gb_s,
        disk_base_s=given.disk_base_s,
    )


def _timing(given: argparse.Namespace) -> StepTiming:
    try:
        return StepTiming(**{name: getattr(given, name) for name in TIMING_HELP})
    except ValueError as error:
        raise RunError(f"{error}; --help lists every flag") from None


def make_parser() -> Parser:
    parser = Parser(prog="kv-router simulate", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--flags", metavar="FILE", help="read flags from a YAML file, by name; the command line overrides it"
    )
    _add_traffic(parser.add_argument_group("Traffic"))
    _add_fleet(parser.add_argument_group("Fleet"))
    _add_store(parser.add_argument_group("Store"))
    _add_router(parser.add_argument_group("Router"))
    _add_study(parser.add_argument_group("Study"))
    return parser


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--workload",
        metavar="NAME",
        help=f"named traffic and its fleet: {', '.join(WORKLOADS)} (default: chat, if there is no --trace)",
    )
    add(
        "--trace",
        metavar="FILE",
        help=f"file of {FORMATS}, or synthetic, or synthetic:KIND",
    )
    add("--duration", type=positive, metavar="SECONDS", help="only the first SECONDS of the trace, by its own clock")
    add("--limit", type=count, metavar="N", help="only the first N requests")
    add(
        "--rate", type=positive, default=1.0, metavar="FACTOR", help="multiple of the trace's request rate (default: 1)"
    )
    times = get_args(Arrivals)
    text = "when requests arrive: as in the trace, or drawn at random at the same mean rate (default: trace)"
    add("--arrivals", choices=times, default="trace", help=text)
    add(
        "--no-reuse", dest="reuse", action="store_false", help="as a control: the same requests without common prefixes"
    )


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, FleetSettings()
    add("--workers", type=count, metavar="N", help="number of workers (default: the workload's, else 8)")
    text = "tokens that each worker's KV cache holds (default: the workload's, else 262144)"
    add("--cache-tokens", type=count, metavar="N", help=text)
    add("--block-size", type=count, default=16, metavar="N", help="tokens per KV block (default: 16)")
    text = "the router gets no KV events, and predicts what workers hold from what it sent them"
    add("--no-kv-events", dest="kv_events", action="store_false", help=text)
    add("--prefill", type=whole, default=0, metavar="N", help="the first N workers only prefill (default: 0)")
    add("--decode", type=whole, default=0, metavar="N", help="the next N workers only decode (default: 0)")
    add(
        "--push",
        action="store_true",
        help="write KV to the decode worker while it is computed, instead of pulling it afterwards",
    )
    for name, unit, what in (
        ("transfer_gb_s", "GB/S", "bandwidth of a KV transfer"),
        ("transfer_base_s", "SECONDS", "fixed time of each KV transfer"),
        ("kv_bytes_per_token", "BYTES", "size of a token's KV"),
    ):
        flag, usual = "--" + name.replace("_", "-"), getattr(default, name)
        add(flag, type=positive, default=usual, metavar=unit, help=f"{what} (default: %(default)s)")
    text = "tokens that a second tier in each worker's host memory holds (default: 0, none)"
    add("--host-tokens", type=whole, default=0, metavar="N", help=text)
    text = "bandwidth of loading from host memory (default: %(default)s)"
    add("--host-gb-s", type=positive, default=default.host_gb_s, metavar="GB/S", help=text)
    text = "fixed time of each load from host memory (default: %(default)s)"
    add("--host-base-s", type=positive, default=default.host_base_s, metavar="SECONDS", help=text)
    text = "tokens that each worker's disk holds, of what its host memory evicts (default: 0, none)"
    add("--disk-tokens", type=whole, default=0, metavar="N", help=text)
    text = "bandwidth of loading from disk (default: %(default)s)"
    add("--disk-gb-s", type=positive, default=default.disk_gb_s, metavar="GB/S", help=text)
    text = "fixed time of each load from disk (default: %(default)s)"
    add("--disk-base-s", type=positive, default=default.disk_base_s, metavar="SECONDS", help=text)
    slow = taking(f"INDEX=FACTOR, such as 0=2, with a FACTOR of {SLOWEST:.0f} at most", parse_slow)
    text = "make worker INDEX (from 0) FACTOR times as slow; repeat for each"
    add("--slow", action="append", default=[], type=slow, metavar="INDEX=FACTOR", help=text)
    forms = "T:slow:INDEX=FACTOR, T:kill:INDEX, T:drain:INDEX or T:join:COUNT"
    change = taking(f"{forms}, in which FACTOR is {SLOWEST:.0f} at most", parse_change)
    text = "a change at second T: slow:INDEX=FACTOR, kill:INDEX, drain:INDEX or join:COUNT; repeat for each"
    add("--change", action="append", default=[], type=change, metavar="T:WHAT", help=text)
    text = "most requests that a worker runs at a time (default: %(default)s)"
    add("--max-num-seqs", type=count, default=default.max_num_seqs, metavar="N", help=text)
    tokens, text = default.max_num_batched_tokens, "most tokens that a step computes (default: %(default)s)"
    add("--max-num-batched-tokens", type=count, default=tokens, metavar="N", help=text)
    text = "most LoRA adapters that a worker runs at once (default: the workload's, else any number)"
    add("--max-loras", type=count, metavar="N", help=text)
    for name, what in TIMING_HELP.items():
        flag, usual = "--" + name.replace("_", "-"), getattr(default.timing, name)
        add(flag, type=float, default=usual, metavar="X", help=f"{what} (default: %(default)s)")


def _add_store(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, FleetSettings()
    text = "tokens that a store shared by all workers holds (default: 0, no store)"
    add("--store-tokens", type=whole, default=0, metavar="N", help=text)
    speed, base = default.store_gb_s, default.store_base_s
    text = "bandwidth of loading from the store into each worker (default: %(default)s)"
    add("--store-gb-s", type=positive, default=speed, metavar="GB/S", help=text)
    text = "fixed time of each load from the store (default: %(default)s)"
    add("--store-base-s", type=positive, default=base, metavar="SECONDS", help=text)
    policies, text = get_args(Eviction), "what the store evicts first (default: %(default)s)"
    add("--store-eviction", choices=policies, default=default.store_eviction, help=text)
    add("--store-ttl", type=positive, metavar="SECONDS", help="how long a block is kept (default: until it is evicted)")
    replicas, text = default.store_replicas, "workers whose memory holds a copy of each block (default: %(default)s)"
    add("--store-replicas", type=count, default=replicas, metavar="N", help=text)
    add(
        "--no-store-credit",
        dest="store_credit",
        action="store_false",
        help="do not tell the router what the store holds",
    )
    text = "show mean TTFT at each of these --store-gb-s, with and without the router knowing what the store holds"
    add("--store-sweep", type=_listed(positive), metavar="X,Y", help=text)


def _add_router(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = f"what is compared: routing modes, policies of mode kv, or affinity (default: {','.join(POLICIES)})"
    add("--policies", type=_listed(str), default=POLICIES, metavar="A,B", help=text)
    add(
        "--baseline",
        metavar="POLICY",
        help="policy that the others are compared with (default: the first that is neither auto nor kv)",
    )
    add("--ttft-slo", type=positive, metavar="SECONDS", help="the router's flag, like the next three (default: none)")
    add("--tbt-slo", type=positive, metavar="SECONDS", help="(default: none)")
    add("--slo-action", choices=get_args(SloAction), default="reject", help="(default: %(default)s)")
    add("--slo-patience", type=positive, default=10.0, metavar="SECONDS", help="(default: %(default)g)")


def _add_study(group: argparse._ArgumentGroup) -> None:
    add, goal = group.add_argument, Goal()
    add(
        "--seeds",
        type=_listed(number),
        default=(0,),
        metavar="0,1",
        help="seeds of traffic and router; with several, means ± half of their 95 %% intervals are shown (default: 0)",
    )
    add("--sweep", type=_listed(positive), metavar="X,Y", help="run with each of these rates, instead of --rate")
    add("--knee", action="store_true", help="find the rate above which queues grow; with --suite, for each workload")
    text = "run every workload (or --workload A,B) at three rates, below and above its knee"
    add("--suite", action="store_true", help=text)
    text = "longest %s of an answer that counts for goodput (default: %%(default)s)"
    add("--goal-ttft", type=positive, default=goal.ttft, metavar="SECONDS", help=text % "TTFT")
    add("--goal-tpot", type=positive, default=goal.tpot, metavar="SECONDS", help=text % "TPOT")
    add(
        "--jobs",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of processes (default: one per core)",
    )
    add("--out", metavar="FILE", help="write settings and figures of every run as JSON")
    add("--page", metavar="FILE", help="write the suite's table as Markdown")


def _listed(read: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    def values(text: str) -> tuple[_T, ...]:
        return tuple(dict.fromkeys(read(one.strip()) for one in text.split(",")))

    return values
