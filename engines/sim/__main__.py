"""`python -m engines.sim`: a simulated fleet until SIGTERM or SIGINT. Ready when it prints one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import get_args

import uvloop
import zmq

from engines.command_line import Parser
from engines.sim.fleet import SimFleet
from engines.sim.settings import ConnectorName, Role, SimSettings
from engines.sim.timing import StepTiming

DEFAULT_PORT = 18_000
TIMING_HELP = {
    "base_s": "seconds of every step",
    "prefill_tokens_per_s": "prefill rate without attention",
    "attention_s_per_pair": "seconds for each pair of a prefilled token and one it attends to",
    "decode_s_per_sequence": "seconds for each decoding sequence of a step",
    "kv_read_s_per_token": "seconds for each token of context that a decoding sequence reads",
}


def make_parser() -> argparse.ArgumentParser:
    default = SimSettings()
    about = "A simulated fleet of vLLM or SGLang workers."
    parser = Parser(prog="kv-sim", usage="kv-sim [FLAGS]", description=about)
    add = parser.add_argument
    add("--workers", type=int, default=default.workers, help="how many (default %(default)s)")
    add("--host", default=default.host, help="address to listen on (default %(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, help="first worker's port; 0: free ports (default %(default)s)")
    add("--flavour", choices=("vllm", "sglang"), default=default.flavour, help="(default %(default)s)")
    add("--model", default=default.model, help="served model name (default %(default)s)")
    add("--lora", action="append", default=[], metavar="NAME", help="served adapter; repeatable")
    add("--block-size", type=int, default=default.block_size, help="tokens a block (default %(default)s)")
    add("--cache-tokens", type=int, default=default.cache_tokens, help="cache of each rank (default %(default)s)")
    add("--speedup", type=float, default=default.speedup, help="simulated seconds per second (default %(default)s)")
    add("--max-num-seqs", type=int, default=default.max_num_seqs, help="running requests (default %(default)s)")
    add(
        "--max-num-batched-tokens",
        type=int,
        default=default.max_num_batched_tokens,
        help="a step (default %(default)s)",
    )
    add("--dp-size", type=int, default=default.dp_size, help="data-parallel ranks a worker (default %(default)s)")
    add("--max-model-len", type=int, default=default.max_model_len, help="tokens a request (default %(default)s)")
    add("--tokenizer", metavar="PATH", help="folder with tokenizer.json (default: one token per UTF-8 byte)")
    add("--no-kv-events", action="store_true", help="publish no KV events")
    add("--slow", action="append", default=[], type=_slow, metavar="INDEX=FACTOR", help="a slower worker; repeatable")
    _add_pair_flags(add, default)
    add("--seed", type=int, default=default.seed, help="of the answers' words (default %(default)s)")
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="(default %(default)s)")
    for name, text in TIMING_HELP.items():
        flag = "--" + name.replace("_", "-")
        add(flag, type=float, default=getattr(default.timing, name), help=f"{text} (default %(default)s)")
    return parser


def _add_pair_flags(add: Callable[..., object], default: SimSettings) -> None:
    role = "what a worker does of a request: prefill, decode or both; repeatable (default both)"
    add("--role", action="append", default=[], type=_role, metavar="INDEX=ROLE", help=role)
    names = get_args(ConnectorName)
    add("--connector", choices=names, default=default.connector, help="how KV goes between them (default %(default)s)")
    text = "gigabytes a second of its bandwidth (default %(default)s)"
    add("--transfer-gb-s", type=float, default=default.transfer_gb_s, help=text)
    text = "bytes of KV a token (default %(default)s)"
    add("--kv-bytes-per-token", type=int, default=default.kv_bytes_per_token, help=text)
    text = "seconds of every transfer (default %(default)s)"
    add("--transfer-base-s", type=float, default=default.transfer_base_s, help=text)
    text = "seconds that KV is kept for a decode that does not come (default %(default)s)"
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = read_settings(arguments)
        uvloop.run(_serve(settings))
    except (ValueError, OSError, zmq.ZMQError) as error:
        parser.error(str(error))
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
