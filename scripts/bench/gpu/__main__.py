"""`python -m scripts.bench.gpu`: starts the engines, runs `python -m router ab` in front of them, and ends them."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence

from router.ab.cli import prepare
from router.ab.errors import RunError
from router.ab.flags import count, positive
from scripts.bench.places import cache_folder
from scripts.bench.processes import CannotStart, interrupt_on_signals

from .engines import Engine, fleet
from .model import SHAPES, Shape, make_model

_DESCRIPTION = """\
The routing modes side by side in front of real vLLM engines, which share one GPU and are ended afterwards. The model
has the size of the one named and made-up weights; nothing is downloaded."""
_SOME_WORKER = ("--worker", "http://127.0.0.1:8000")
_EPILOG = "All other flags are those of python -m router ab, such as --modes, --trace, --rates and --html."


def main(argv: list[str]) -> int:
    """Exit status: that of `ab`; 2 where the engines cannot be started; 130 when it was interrupted."""
    own, rest = _make_parser().parse_known_args(argv)
    try:
        prepare([*_SOME_WORKER, *rest])  # before minutes have gone into starting engines
    except RunError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    shape = SHAPES[own.shape]
    model = cache_folder() / own.shape
    make_model(model, shape)
    print(f"{own.workers} engines with room for {_tokens(own.kv_gigabytes, shape)} tokens each", flush=True)
    try:
        engine = Engine(own.vllm, model, own.kv_gigabytes, own.memory_share, own.vllm_arg)
        with fleet(engine, own.workers) as workers:
            named = [part for worker in workers for part in ("--worker", worker)]
            return _compare([*named, *rest])
    except (CannotStart, OSError) as error:
        print(f"gpu: {error}\nThe engines' logs are in {cache_folder() / 'logs'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _compare(flags: Sequence[str]) -> int:
    """Runs `ab`; interrupted, it has the time to end its router and to report what it has measured."""
    # In a session of its own: Ctrl-C at the terminal reaches it through this process only.
    comparison = subprocess.Popen([sys.executable, "-m", "router", "ab", *flags], start_new_session=True)
    while True:
        try:
            return comparison.wait()
        except KeyboardInterrupt:
            comparison.send_signal(signal.SIGINT)


def _tokens(gigabytes: float, shape: Shape) -> int:
    return int(gigabytes * 1e9 / shape.kv_bytes_per_token)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench/gpu/run", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False
    )
    parser.add_argument("--vllm", default="vllm", metavar="COMMAND", help="what runs vLLM (default: vllm)")
    further = "a further flag for vLLM, written with a =, such as --vllm-arg=--enforce-eager; repeat for each"
    parser.add_argument("--vllm-arg", action="append", default=[], metavar="FLAG", help=further)
    parser.add_argument("--workers", type=count, default=4, metavar="N", help="engines (default: 4)")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b", help="size of the model (default: qwen3-1.7b)")
    parser.add_argument(
        "--kv-gigabytes", type=positive, default=12.0, metavar="GB", help="KV cache of each engine (default: 12)"
    )
    parser.add_argument(
        "--memory-share",
        type=positive,
        default=0.2,
        metavar="SHARE",
        help="of the GPU's memory, which an engine wants to see free when it starts (default: 0.2)",
    )
    return parser


if __name__ == "__main__":
    interrupt_on_signals()  # engines would otherwise keep the GPU's memory
    sys.exit(main(sys.argv[1:]))
