"""The policy that docs/policies.md shows is one."""

from __future__ import annotations

import re
from pathlib import Path

from router.scheduling.cheapest import Cheapest
from tests.router.scheduling.candidates import Scripted, named, situation

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


def test_the_policy_in_the_docs_does_what_it_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 15
    scope: dict[str, type] = {}
    exec(code, scope)
    nearest = Cheapest(scope["Nearest"]())
    fleet = situation(named("abc"), 100, overlap=[96, 48, 0], requests=[9, 3, 0])
    assert nearest.choose(fleet, Scripted([])).position == 1
