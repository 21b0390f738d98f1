"""What a run is told on its command line: the flags of `python -m router ab`, and a few of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec

from router.ab.errors import RunError
from router.ab.plan import MODES, UNROUTED, Plan, read_plan

OURS, DYNAMO = "ours", "dynamo"
_ROUTED = tuple(mode for mode in MODES if mode != UNROUTED)
_ACCEPTANCE = ("--duration", "480", "--rate", "2", "--speedup", "1")

_DESCRIPTION = """\
Our router beside Dynamo's selection service (dynamo.select_service), one after the other in front of fresh simulated
fleets, with the same requests at the same times. By default the first 480 s of the trace at twice its rate, in real
time."""
_EPILOG = """\
The other flags are those of python -m router ab, which see: --trace, --duration, --rate, --limit, --max-output,
--seed, --arrivals, --no-reuse, --sim-workers, --cache-tokens, --block-size, --speedup, --sim-arg, --timeout, --out, and
--router-arg, which only the arm "ours" gets."""


class Options(msgspec.Struct, frozen=True):
    """`plan.modes` are the arms."""

    plan: Plan
    repeats: int


def read_options(argv: Sequence[str]) -> Options:
    """Raises RunError for flags that cannot be used."""
    own, rest = _make_parser().parse_known_args(argv)
    arms = tuple(name.strip() for name in own.arms.split(","))
    for name in arms:
        if name not in (OURS, DYNAMO, *_ROUTED) or arms.count(name) > 1:
            raise RunError(f"--arms takes each of {OURS}, {DYNAMO}, {', '.join(_ROUTED)} at most once; not {name!r}")
    plan = read_plan([*_ACCEPTANCE, *rest])
    if {flag.partition("=")[0] for flag in rest} & {"--worker", "--model", "--modes", "--baseline"}:
        raise RunError(
            "--worker, --model, --modes and --baseline mean nothing here: the fleet is simulated, and --arms names arms"
        )
    if not plan.single or plan.html:
        raise RunError("a run here has one --rate and one --seed, and no --html; --repeats makes several")
    if own.repeats < 1:
        raise RunError("--repeats must be at least 1")
    return Options(
        msgspec.structs.replace(plan, modes=arms, baseline=DYNAMO if DYNAMO in arms else arms[0]), own.repeats
    )


def rotated(arms: Sequence[str], repeat: int) -> list[str]:
    """Another arm is first in every repeat."""
    first = repeat % len(arms)
    return [*arms[first:], *arms[:first]]


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench/selection/run", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False
    )
    arms = f"{OURS},{DYNAMO},round-robin"
    parser.add_argument("--arms", default=arms, help=f"comma-separated; also modes of our router (default: {arms})")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="each with fresh fleets (default: 1)")
    return parser
