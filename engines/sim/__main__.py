"""`python -m engines.sim`: a simulated fleet until SIGTERM or SIGINT. Ready when it prints one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields

import uvloop
import zmq

from engines.sim.fleet import SimFleet
from engines.sim.settings import SimSettings
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
    parser = argparse.ArgumentParser(prog="kv-sim", description="A simulated fleet of vLLM or SGLang workers.")
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
    add("--seed", type=int, default=default.seed, help="of the answers' words (default %(default)s)")
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="(default %(default)s)")
    for name, text in TIMING_HELP.items():
        flag = "--" + name.replace("_", "-")
        add(flag, type=float, default=getattr(default.timing, name), help=f"{text} (default %(default)s)")
    return parser


def read_settings(arguments: argparse.Namespace) -> SimSettings:
    """ValueError for numbers that make no fleet."""
    given = {field.name: getattr(arguments, field.name) for field in fields(SimSettings) if field.name in arguments}
    given |= {
        "loras": tuple(arguments.lora),
        "kv_events": not arguments.no_kv_events,
        "slow": dict(arguments.slow),
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
        sys.stdout.write(json.dumps({"workers": fleet.urls}) + "\n")
        sys.stdout.flush()
        await stop.wait()


def _slow(text: str) -> tuple[int, float]:
    index, _, factor = text.partition("=")
    return int(index), float(factor)


if __name__ == "__main__":
    sys.exit(main())
