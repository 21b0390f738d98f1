"""Makes the policy that the settings name: one of the router's own, or one of an installed package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import get_args

from router.installed_policy import InstalledPolicy
from router.scheduling.auto import Auto
from router.scheduling.balance import LeastLoaded, PowerOfTwo, Random, RoundRobin
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import CostPolicy, Policy
from router.scheduling.lmetric import LMetric
from router.scheduling.overlap import OverlapCost
from router.scheduling.ttft import PredictedTTFT
from router.settings import RouterMode, Settings, SettingsError

ENTRY_POINTS = "kv_router.policies"
"""Group under which a package names what makes its `CostPolicy`, called without arguments."""
BUILT_IN: dict[str, Callable[[], CostPolicy]] = {
    "auto": Auto,
    "overlap": lambda: OverlapCost(1.0),
    "lmetric": LMetric,
    "ttft": PredictedTTFT,
}


def make_policy(settings: Settings, *, strict: bool = False) -> Policy:
    """Raises SettingsError if there is no policy of that name. `strict`: an installed one whose answer cannot be used
    raises PolicyFault; otherwise `overlap` answers instead."""
    match settings.router_mode:
        case "kv":
            return Cheapest(_costs(settings, strict), settings.router_temperature)
        case "round-robin":
            return RoundRobin()
        case "random":
            return Random()
        case "power-of-two":
            return PowerOfTwo()
        case _:  # direct requests name their worker; its ranks are balanced like least-loaded
            return LeastLoaded()


def _costs(settings: Settings, strict: bool) -> CostPolicy:
    weight, name = settings.kv_overlap_score_weight, settings.kv_policy
    if weight is not None:
        if name not in {"overlap", "auto"}:
            raise SettingsError(
                f"--kv-overlap-score-weight belongs to --kv-policy overlap, not to {name}: give one of the two."
            )
        return OverlapCost(weight)
    return BUILT_IN[name]() if name in BUILT_IN else _installed(name, strict)


def known_policies() -> list[str]:
    """Names that `--kv-policy` takes."""
    return [*BUILT_IN, *sorted(point.name for point in entry_points(group=ENTRY_POINTS))]


def _installed(name: str, strict: bool) -> CostPolicy:
    for point in entry_points(group=ENTRY_POINTS, name=name):
        try:
            policy: CostPolicy = point.load()()
        except Exception as error:
            raise SettingsError(f"--kv-policy {name} of {point.value} cannot be loaded: {error}") from error
        if not callable(getattr(policy, "cost", None)):
            kind = type(policy).__name__
            raise SettingsError(f"--kv-policy {name} of {point.value} is none: {kind} has no method `cost`.")
        return InstalledPolicy(name, policy, None if strict else OverlapCost(1.0))
    known, mode = ", ".join(known_policies()), name.replace("_", "-")
    hint = (
        f"{mode} is a --router-mode" if mode in get_args(RouterMode) else "docs/policies.md tells how to install others"
    )
    raise SettingsError(f"--kv-policy takes one of {known}, not {name!r}; {hint}.")
