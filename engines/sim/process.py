"""The simulated fleet as a process, until SIGTERM or SIGINT. Ready when it prints one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import get_args

import uvloop
import zmq

from engines.command_line import Parser, version_of
from engines.description import Role
from engines.sim.fleet import SimFleet
from engines.sim.settings import ConnectorName, SimSettings
from engines.sim.timing import HELP as TIMING_HELP
from engines.sim.timing import StepTiming, flag_of

DEFAULT_PORT = 18_000
LOG_LEVELS = ("debug", "info", "warning", "error")
FILES_OF_ITS_OWN, FILES_PER_RANK = 30, 4
"""Beside those of clients: libraries and standard streams; a rank's events and their replay take two each."""


def make_parser() -> argparse.ArgumentParser:
    default = SimSettings()
    about = (
        "Serves a simulated fleet of vLLM or SGLang workers, without a GPU. When it is ready, it prints one line of "
        "JSON with the workers' URLs; SIGTERM or SIGINT ends it. Times are simulated seconds."
    )
    parser = Parser(prog="kv-sim", usage="kv-sim [FLAGS]", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--version", action="version", version=version_of("kv-sim"), help="show the version and exit")
    add("--workers", type=int, default=default.workers, help="number of workers (default %(default)s)")
    add("--host", default=default.host, help="address to listen on (default %(default)s)")
    add(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port of the first worker, the others follow; 0 takes free ports (default %(default)s)",
    )
    add(
        "--flavour", choices=("vllm", "sglang"), default=default.flavour, help="engine to imitate (default %(default)s)"
    )
    add("--model", default=default.model, help="name of the served model (default %(default)s)")
    add(
        "--lora",
        action="append",
        default=[],
        metavar="NAME",
        help="name of a served LoRA adapter; repeat the flag for each",
    )
    text = "most LoRA adapters that each rank runs at once (default: any number)"
    add("--max-loras", type=int, metavar="N", help=text)
    add("--block-size", type=int, default=default.block_size, help="tokens per KV block (default %(default)s)")
    add(
        "--cache-tokens",
        type=int,
        default=default.cache_tokens,
        help="tokens that each rank's KV cache holds (default %(default)s)",
    )
    add(
        "--speedup", type=float, default=default.speedup, help="simulated seconds per real second (default %(default)s)"
    )
    add(
        "--max-num-seqs",
        type=int,
        default=default.max_num_seqs,
        help="most requests that each rank runs at a time (default %(default)s)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        default=default.max_num_batched_tokens,
        help="most tokens that each step computes (default %(default)s)",
    )
    add("--dp-size", type=int, default=default.dp_size, help="data-parallel ranks of each worker (default %(default)s)")
    add(
        "--max-model-len",
        type=int,
        default=default.max_model_len,
        help="most tokens of a prompt and its answer together (default %(default)s)",
    )
    add("--tokenizer", metavar="PATH", help="folder with tokenizer.json (default: one token per UTF-8 byte)")
    add("--no-kv-events", action="store_true", help="do not publish KV events")
    add(
        "--slow",
        action="append",
        default=[],
        type=_slow,
        metavar="INDEX=FACTOR",
        help="make worker INDEX (from 0) FACTOR times as slow; repeat the flag for each",
    )
    _add_pair_flags(add, default)
    add(
        "--seed",
        type=int,
        default=default.seed,
        help="seed of the random choice of the answers' words (default %(default)s)",
    )
    add(
        "--log-level",
        default="warning",
        choices=LOG_LEVELS,
        help="lowest severity that is logged (default %(default)s)",
    )
    for name, text in TIMING_HELP.items():
        add(flag_of(name), type=float, default=getattr(default.timing, name), help=f"{text} (default %(default)s)")
    return parser


def _add_pair_flags(add: Callable[..., object], default: SimSettings) -> None:
    role = "what worker INDEX (from 0) does: prefill, decode or both; repeat the flag for each (default both)"
    add("--role", action="append", default=[], type=_role, metavar="INDEX=ROLE", help=role)
    names = get_args(ConnectorName)
    add(
        "--connector",
        choices=names,
        default=default.connector,
        help="how KV moves between workers (default %(default)s)",
    )
    text = "bandwidth of a KV transfer, in gigabytes per second (default %(default)s)"
    add("--transfer-gb-s", type=float, default=default.transfer_gb_s, help=text)
    text = "size of a token's KV, in bytes (default %(default)s)"
    add("--kv-bytes-per-token", type=int, default=default.kv_bytes_per_token, help=text)
    text = "fixed time of each KV transfer, in seconds (default %(default)s)"
    add("--transfer-base-s", type=float, default=default.transfer_base_s, help=text)
    text = "how long KV is kept for its decode worker, in seconds (default %(default)s)"
    add("--lease-s", type=float, default=default.lease_s, help=text)


def read_settings(arguments: argparse.Namespace) -> SimSettings:
    """ValueError for numbers that make no fleet."""
    given = {field.name: getattr(arguments, field.name) for field in fields(SimSettings) if field.name in arguments}
    given |= {
        "loras": tuple(arguments.lora),
        "kv_events": not arguments.no_kv_events,
        "slow": dict(arguments.slow),
        "roles": dict(arguments.role),
        "timing": StepTiming(**{name: getattr(arguments, name) for name in TIMING_HELP}),
    }
    return SimSettings(**given)


def run(argv: Sequence[str] | None) -> int:
    """Returns the process's exit status: 0 after a signal. Exits with 2 for flags that make no fleet."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = read_settings(arguments)
        _allow_files(settings)
        uvloop.run(_serve(settings))
    except (ValueError, OSError, zmq.ZMQError) as error:
        parser.error(str(error))
    return 0


def _allow_files(settings: SimSettings) -> None:
    """As many as the system lets us. Raises ValueError if these cannot suffice: libzmq aborts where it gets none."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # then it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = 1 + (FILES_PER_RANK * settings.dp_size if settings.kv_events else 0)
    if limit != resource.RLIM_INFINITY and limit < FILES_OF_ITS_OWN + each * settings.workers:
        raise ValueError(f"{limit} open files are too few for so many workers: raise `ulimit -Hn`")


async def _serve(settings: SimSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with SimFleet(settings) as fleet:
        gc.freeze()  # what is there by now stays: the end would take 0.3 s longer, to look for garbage in it
        ready: dict[str, object] = {"workers": fleet.urls}
        if fleet.bootstraps:
            ready["bootstraps"] = fleet.bootstraps
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await stop.wait()


def _slow(text: str) -> tuple[int, float]:
    index, _, factor = text.partition("=")
    try:
        return int(index), float(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it takes INDEX=FACTOR, such as 0=2, not {text!r}") from None


def _role(text: str) -> tuple[int, Role]:
    index, _, name = text.partition("=")
    roles: dict[str, Role] = {role: role for role in get_args(Role)}
    try:
        return int(index), roles[name]
    except (ValueError, KeyError):
        form = f"INDEX=ROLE, the role being {' or '.join(roles)}"
        raise argparse.ArgumentTypeError(f"it takes {form}, not {text!r}") from None
