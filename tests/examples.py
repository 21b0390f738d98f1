"""How many examples are drawn, by Hypothesis or the fuzzer: all, or a part of them where it must be quick."""

from __future__ import annotations

from typing import Final

from hypothesis import HealthCheck, settings

ALL: Final = 100
"""Of a test that says nothing about it, which is Hypothesis' own number."""
QUICK: Final = 25
"""Of each 100, in `scripts/test unit`."""


def register_profiles() -> None:
    """As CI needs them: the same examples every time, and no deadline that a busy machine could miss."""
    for name, number in (("tests", ALL), ("unit", QUICK)):
        settings.register_profile(
            name,
            deadline=None,
            derandomize=True,
            max_examples=number,
            suppress_health_check=[HealthCheck.too_slow],
        )


def examples(number: int) -> int:
    """`number`, or the part of it that the profile draws."""
    profile = settings.default
    assert profile
    return max(1, number * profile.max_examples // ALL)
