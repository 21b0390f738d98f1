"""Every command's flags stand on its page, and no others. (The router's own: tests/router/test_docs.py.)"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import engines.sim.process
import publishers.cli
import router.ab.live
import router.ab.plan

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(
    ("page", "parsers"),
    [
        ("publishers.md", [publishers.cli.make_parser()]),
        ("simulator.md", [engines.sim.process.make_parser()]),
        ("ab.md", [router.ab.plan.make_parser(), router.ab.live.make_parser()]),
    ],
)
def test_flags_and_page_agree(page: str, parsers: Sequence[argparse.ArgumentParser]) -> None:
    options = [option for parser in parsers for action in parser._actions for option in action.option_strings]
    flags = {option for option in options if option.startswith("--")} - {"--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / page).read_text("utf-8")))
    assert not flags - named, "flags that the page does not explain"
    foreign = {"--event-plane", "--event-namespace", "--kv-events-config", "--router-mode", "--worker", "--engine"}
    foreign |= {
        "--ab",
        "--ab-sticky",
        "--api-keys",
        "--backend",
        "--flag",
        "--flush-cache",
        "--help",
        "--reset-kv-cache",
        "--sse-keep-alive",
        "--tokenizer",
        "--enable-prompt-tokens-details",
        "--enable-cache-report",
    }
    assert not named - flags - foreign, "the page names flags that do not exist"
