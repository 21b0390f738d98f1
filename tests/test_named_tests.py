"""The tests that the threat model, the table of limits and the promises name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("docs/threat-model.md", "docs/security.md", "docs/reliability.md")
NAMED = [(page, name) for page in PAGES for name in re.findall(r"`(tests/[^`]+)`", (ROOT / page).read_text("utf-8"))]


@pytest.mark.parametrize(("page", "name"), NAMED)
def test_each_test_named_exists(page: str, name: str) -> None:
    file, _, function = name.partition("::")
    assert (ROOT / file).exists()
    assert not function or re.search(rf"^(async )?def {function}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE)


def test_each_threat_has_a_test_or_is_accepted() -> None:
    rows = [row for row in (ROOT / PAGES[0]).read_text("utf-8").splitlines() if row.startswith("| ")]
    threats = [row for row in rows if not row.startswith(("| what it tries", "|---"))]
    assert len(threats) > 40
    for row in threats:
        assert "`tests/" in row or "accepted" in row or "`scripts/audit`" in row, row
