"""The settings of a run, read from its command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, get_args

import msgspec

from router.ab.arrivals import Arrivals, prepare
from router.ab.errors import RunError
from router.ab.flags import Parser, check_distinct, count, number, positive, router_url
from router.ab.trace import SHAPES, Row
from router.ab.trace_file import FORMATS, file_of, load
from router.security.worker_access import WorkerAccess, read_access
from router.settings import RouterMode
from router.workers.spec import parse_worker

UNROUTED = "none"
"""The mode without a router, in which the client takes the workers in turn itself."""
MODES = (*(mode for mode in get_args(RouterMode) if mode != "direct"), UNROUTED)
"""`direct` needs a worker named in every request, so a trace cannot be replayed in it."""

SIM_SPEEDUP = 4.0
"""Simulated seconds per real second, unless told otherwise."""

_Value = TypeVar("_Value")

_DESCRIPTION = """\
Replays one trace, open loop, against the same fleet once per routing mode, and sets the results side by side. Each mode
starts with empty caches. Without --worker the fleet is simulated, and times are simulated seconds.
`kv-router ab report URL` compares the arms of a running router's live traffic instead (--ab)."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run's settings. Sizes in tokens, durations in the trace's own seconds."""

    trace: str
    modes: tuple[str, ...]
    workers: tuple[str, ...] = ()
    """Workers, as in the router's `--worker`; empty for a simulated fleet."""
    peers: dict[str, str] = {}
    """URLs of other routers in front of these workers, by their names among the modes."""
    worker_api_key_file: str | None = None
    worker_ca: str | None = None
    worker_cert: str | None = None
    worker_key: str | None = None
    sim_workers: int = 8
    cache_tokens: int = 262_144
    block_size: int = 16
    speedup: float = SIM_SPEEDUP
    rates: tuple[float, ...] = (1.0,)
    """Request rates, as multiples of the trace's."""
    duration: float | None = None
    limit: int | None = None
    max_output: int | None = None
    seeds: tuple[int, ...] = (0,)
    arrivals: Arrivals = "trace"
    no_reuse: bool = False
    ttft_slo: float | None = None
    model: str | None = None
    timeout: float = 600.0
    out: str | None = None
    html: str | None = None
    baseline: str
    sim_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        return not self.workers

    @property
    def single(self) -> bool:
        """Whether there is only one rate and one seed."""
        return len(self.rates) == len(self.seeds) == 1

    @property
    def rate(self) -> float:
        """The first."""
        return self.rates[0]

    @property
    def seed(self) -> int:
        """The first."""
        return self.seeds[0]

    def access(self) -> WorkerAccess:
        """The credentials for requests to engines. Raises RunError for a file that cannot be used."""
        try:
            return read_access(self)
        except ValueError as error:
            raise RunError(str(error)) from None

    @property
    def fleet_flags(self) -> list[str]:
        """Of the simulated fleet, for `python -m engines.sim`."""
        sizes = ["--workers", str(self.sim_workers), "--cache-tokens", str(self.cache_tokens)]
        sizes += ["--block-size", str(self.block_size), "--speedup", f"{self.speedup:g}"]
        return ["--port", "0", *sizes, *self.sim_args]

    @property
    def access_flags(self) -> list[str]:
        """The same credentials, as flags for the router."""
        given = [(flag, getattr(self, name)) for flag, name in zip(_ACCESS_FLAGS, _ACCESS_FILES, strict=True)]
        return [part for flag, path in given if path is not None for part in (flag, path)]

    def router_flags(self, seed: int) -> list[str]:
        """For a router, besides its mode and workers. A file in `--router-arg=--config=FILE` may split traffic in arms,
        each with a mode of its own."""
        return ["--seed", str(seed), "--ab", "none", "--log-level", "warning", *self.access_flags, *self.router_args]

    def rows(self, seed: int) -> list[Row]:
        """The requests to send. Raises RunError when the trace cannot be used or nothing of it is left."""
        kept = prepare(
            load(self.trace, seed),
            seed,
            duration=self.duration,
            limit=self.limit,
            arrivals=self.arrivals,
            reuse=not self.no_reuse,
            max_output=self.max_output,
        )
        if not kept:
            raise RunError(f"no request of {self.trace} is left; give a longer --duration or a larger --limit")
        return kept


_NAME = re.compile(r"[\w.-]{1,40}")
_ACCESS_FILES = ("worker_api_key_file", "worker_ca", "worker_cert", "worker_key")
_ACCESS_FLAGS = tuple("--" + name.replace("_", "-") for name in _ACCESS_FILES)
_SIMULATED = ("sim_workers", "cache_tokens", "block_size", "sim_arg")
"""Flags that only a simulated fleet takes."""
_SIMS = {"--workers": "--sim-workers", **{flag: flag for flag in ("--cache-tokens", "--block-size", "--speedup")}}
_ROUTERS = {
    "--router-mode": "--modes",
    "--ab": "--modes",
    "--seed": "--seeds",
    "--worker": "--worker",
    **{flag: flag for flag in _ACCESS_FLAGS},
}
"""Flags of the simulator and of the router that are set from flags here."""


def read_plan(argv: Sequence[str]) -> Plan:
    """Raises RunError for flags that cannot be used; `--help` prints and raises SystemExit(0)."""
    given = vars(make_parser().parse_args(argv))
    peers = _peers(given.pop("peer"))
    modes = (*_labelled(given.pop("modes").split(",")), *peers)
    workers = tuple(_worker(text) for text in given.pop("worker"))
    simulated = {name: given.pop(name) for name in _SIMULATED}
    stated = [name for name, value in simulated.items() if value]
    if workers and stated:
        raise RunError(f"--{stated[0].replace('_', '-')} is for a simulated fleet, and --worker names another")
    _check_further("--sim-arg", simulated["sim_arg"], _SIMS)
    _check_further("--router-arg", given["router_arg"], _ROUTERS)
    if peers and not workers:
        raise RunError("--peer names a router in front of workers that run already; name them with --worker")
    check_distinct({"--trace": file_of(given["trace"]), "--out": given["out"], "--html": given["html"]})
    speedup = given.pop("speedup") or (1.0 if workers else SIM_SPEEDUP)
    baseline = given.pop("baseline") or next((mode for mode in modes if mode_of(mode) != "kv"), modes[0])
    if baseline not in modes:
        raise RunError(f"the baseline {baseline} is not among the modes {', '.join(modes)}; add it to --modes")
    return Plan(
        modes=modes,
        workers=workers,
        peers=peers,
        speedup=speedup,
        baseline=baseline,
        sim_args=tuple(simulated.pop("sim_arg")),
        router_args=tuple(given.pop("router_arg")),
        **given,
        **{name: value for name, value in simulated.items() if value},
    )


def _check_further(flag: str, given: Sequence[str], own: Mapping[str, str]) -> None:
    """Refuses what would win over the flags that the report goes by, and make it wrong."""
    for text in given:
        name = text.partition("=")[0]
        if name in own:
            raise RunError(f"{flag}: {name} is for ab itself to set, which reports by it; give {own[name]}")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="kv-router ab", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    kinds = ", ".join(f"synthetic:{kind}" for kind in SHAPES)
    traces = f"what is replayed: a file of {FORMATS}, or one of {kinds} (default: the first of these)"
    add("--trace", default="synthetic", metavar="FILE", help=traces)
    names = ", ".join(MODES)
    modes = f"what is compared, separated by commas: {names}; a mode may be named twice (default: %(default)s)"
    add("--modes", default="kv,round-robin", help=modes)
    add("--baseline", metavar="MODE", help="mode that the others are compared with (default: the first that is not kv)")
    add(
        "--duration",
        type=positive,
        metavar="SECONDS",
        help="replay only the first SECONDS of the trace, by its own clock",
    )
    rates = "multiples of the trace's request rate, separated by commas; one run for each (default: 1)"
    add("--rates", "--rate", type=_list(positive), default=(1.0,), metavar="FACTOR[,...]", help=rates)
    add("--limit", type=count, metavar="N", help="replay only the first N requests")
    add("--max-output", type=count, metavar="N", help="limit answers to N tokens")
    seeds = "seeds of prompts, synthetic trace, arrivals and router, separated by commas; one run for each (default: 0)"
    add("--seeds", "--seed", type=_list(number), default=(0,), metavar="N[,...]", help=seeds)
    drawn = "when requests arrive: as in the trace, or drawn at random at the same mean rate (default: trace)"
    add("--arrivals", choices=get_args(Arrivals), default="trace", help=drawn)
    add("--no-reuse", action="store_true", help="as a control: the same requests without common prefixes")
    add(
        "--ttft-slo",
        type=positive,
        metavar="SECONDS",
        help="also report the share of requests with a TTFT within SECONDS (simulated ones); no request is refused",
    )
    add("--out", metavar="FILE", help="write settings, summaries and every request as JSON")
    add("--html", metavar="FILE", help="write the report as a page with charts")
    further = (
        "a further flag for the router, written with a =, such as --router-arg=--kv-policy=lmetric; repeat for each"
    )
    add("--router-arg", action="append", default=[], metavar="FLAG", help=further)
    add(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="SECONDS",
        help="seconds of real time after which a missing answer counts as an error (default: 600)",
    )
    real = parser.add_argument_group("A real fleet")
    real.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL",
        help="an engine, as for the router's --worker; repeat for each",
    )
    real.add_argument(
        "--peer",
        action="append",
        type=_peer,
        default=[],
        metavar="NAME=URL",
        help="another router in front of the same workers, to be compared too; repeat for each",
    )
    real.add_argument("--worker-api-key-file", metavar="FILE", help="file with the API key of the engines")
    real.add_argument(
        "--worker-ca", metavar="FILE", help="the authorities (PEM) of https:// engines (default: the system's)"
    )
    real.add_argument("--worker-cert", metavar="FILE", help="the client certificate (PEM) to show to https:// engines")
    real.add_argument("--worker-key", metavar="FILE", help="the private key of --worker-cert (PEM)")
    real.add_argument("--model", metavar="NAME", help="the model to ask for (default: what the first worker serves)")
    sim = parser.add_argument_group("A simulated fleet")
    sim.add_argument("--sim-workers", type=count, metavar="N", help="number of workers (default: 8)")
    sim.add_argument(
        "--cache-tokens", type=count, metavar="N", help="tokens that each worker's KV cache holds (default: 262144)"
    )
    sim.add_argument("--block-size", type=count, metavar="N", help="tokens per KV block (default: 16)")
    sim.add_argument(
        "--speedup",
        type=positive,
        metavar="FACTOR",
        help="simulated seconds per real second (default: 4; with --worker: 1)",
    )
    further = "a further flag for kv-sim, written with a =, such as --sim-arg=--dp-size=2; repeat for each"
    sim.add_argument("--sim-arg", action="append", default=[], metavar="FLAG", help=further)
    return parser


def _labelled(names: Sequence[str]) -> tuple[str, ...]:
    """The names of modes in the report: repeated ones, as in an A/A run, are numbered."""
    labels: list[str] = []
    for name in (name.strip() for name in names):
        if name not in MODES:
            raise RunError(f"there is no mode {name!r}; --modes takes {', '.join(MODES)}")
        times = sum(mode_of(label) == name for label in labels)
        labels.append(f"{name}#{times + 1}" if times else name)
    return tuple(labels)


def mode_of(label: str) -> str:
    """The mode of a name in the report, as the router calls it."""
    return label.partition("#")[0]


def _peer(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not _NAME.fullmatch(name) or name in MODES:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=http://HOST:PORT, with a name that is no mode's")
    if url.rstrip("/").endswith("/v1"):
        raise argparse.ArgumentTypeError(f"{url!r} ends in /v1, which is added to it; leave it out")
    return name, router_url(url)


def _peers(given: Sequence[tuple[str, str]]) -> dict[str, str]:
    peers: dict[str, str] = {}
    for name, url in given:
        if name in peers:
            raise RunError(f"--peer names {name} twice")
        peers[name] = url
    return peers


def _worker(text: str) -> str:
    try:
        parse_worker(text)
    except ValueError as error:
        raise RunError(f"--worker: {error}") from None
    return text


def _list(read: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    """Splits a comma-separated list, and refuses duplicates."""

    def read_all(text: str) -> tuple[_Value, ...]:
        values = tuple(read(part) for part in text.split(","))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text} names one twice")
        return values

    return read_all
