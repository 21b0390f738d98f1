"""The arms of a live A/B test as the operator names them: `ARM:WEIGHT,ARM:WEIGHT…`."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, cast, get_args

ArmMode = Literal["kv", "round-robin", "random", "least-loaded", "power-of-two"]
MODES = get_args(ArmMode)
"""What an arm may be; `direct` lets the request choose, so there is nothing to compare."""
EXAMPLE = "kv:90,round-robin:10"


class ArmSpec(NamedTuple):
    name: str
    """The arm as it was written; one that comes again is numbered."""
    mode: ArmMode
    policy: str | None
    """Of mode kv, if one is stated."""
    weight: float


def read_arms(text: str) -> tuple[ArmSpec, ...]:
    """Raises ValueError, with a sentence for people, for anything but such a list."""
    found: list[ArmSpec] = []
    for part in text.split(","):
        spec = _read_arm(part.strip())
        times = sum((other.mode, other.policy) == (spec.mode, spec.policy) for other in found)
        found.append(spec._replace(name=f"{spec.name}#{times + 1}") if times else spec)
    if len(found) < 2:
        raise ValueError(f"{text!r} is one arm only; give two or more, such as {EXAMPLE}.")
    return tuple(found)


def _read_arm(text: str) -> ArmSpec:
    name, colon, weight = text.rpartition(":")
    if not colon:
        raise ValueError(f"{text!r} has no weight; write ARM:WEIGHT, such as {EXAMPLE}.")
    mode, slash, policy = name.partition("/")
    if mode not in MODES:
        raise ValueError(f"{mode!r} is no arm; these are: {', '.join(MODES)}, and kv/POLICY.")
    if slash and (mode != "kv" or not policy):
        raise ValueError(f"{name!r} is no arm; only kv has policies, written kv/POLICY.")
    return ArmSpec(name, cast("ArmMode", mode), policy or None, _read_weight(weight, text))


def _read_weight(text: str, arm: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"{arm!r} has no weight above 0; write ARM:WEIGHT, such as {EXAMPLE}.")
    return weight
