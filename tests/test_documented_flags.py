"""Every command's flags stand on its page, and no others. (The router's own: tests/router/test_docs.py.)"""

import argparse
import re
from pathlib import Path

import pytest

import engines.sim.__main__
import publishers.cli
import router.ab.plan

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(
    ("page", "parser"),
    [
        ("publishers.md", publishers.cli.make_parser()),
        ("simulator.md", engines.sim.__main__.make_parser()),
        ("ab.md", router.ab.plan.make_parser()),
    ],
)
def test_flags_and_page_agree(page: str, parser: argparse.ArgumentParser) -> None:
    flags = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")} - {"--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / page).read_text("utf-8")))
    assert not flags - named, "flags that the page does not explain"
    foreign = {"--event-plane", "--event-namespace", "--kv-events-config", "--router-mode", "--worker", "--engine"}
    foreign |= {"--ab", "--ab-sticky", "--flag", "--help", "--enable-prompt-tokens-details", "--enable-cache-report"}
    assert not named - flags - foreign, "the page names flags that do not exist"
