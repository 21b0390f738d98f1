"""Links from page to page lead somewhere: the file is there, and the heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lead_nowhere(page: Path) -> list[str]:
    targets = re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page))
    return [target for target in targets if not leads_somewhere(page, *target.partition("#")[::2])]


def leads_somewhere(page: Path, file: str, anchor: str) -> bool:
    found = page.parent / file if file else page
    return found.exists() and (not anchor or anchor in anchors(found))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not lead_nowhere(page)


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_a_page_is_found_from_the_readme(page: Path) -> None:
    """In one step, or by way of another page."""
    linked = re.findall(r"\]\((?:docs/)?([\w-]+\.md)", prose(ROOT / "README.md"))
    assert page.name in linked or any(f"({page.name}" in prose(ROOT / "docs" / other) for other in linked)


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n[1](#a-b-c) [2](#a) [3](page.md#a-b-c) [4](none.md) [5](https://none.example)\n")
    assert lead_nowhere(page) == ["#a", "none.md"]
