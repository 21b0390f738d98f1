"""Every flag stands on the store's page, and no command is missing there."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from router.store_cli.cli import make_parser

PAGE = Path(__file__).parents[3] / "docs" / "store.md"


def test_commands_and_flags_are_on_the_page() -> None:
    section = PAGE.read_text("utf-8").partition("## Looking into it")[2].partition("\n## ")[0]
    [commands] = [action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    assert {row.split()[0] for row in re.findall(r"^\| `(.*?)`", section, re.MULTILINE)} == set(commands.choices)
    parsers = commands.choices.values()
    flags = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    flags = {flag for flag in flags if flag.startswith("--")} - {"--help"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section)) == flags
