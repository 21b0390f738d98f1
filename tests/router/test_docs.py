"""The reference pages name everything there is, and nothing that there is not."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from router.cli import make_parser
from router.settings import GROUPS, Option, options

DOCS = Path(__file__).parents[2] / "docs"
CONFIGURATION = DOCS / "configuration.md"
METRICS = DOCS / "metrics.md"


def row(option: Option) -> str:
    """The line that the page must hold for a setting."""
    switch = f" / `--no-{option.flag[2:]}`" if option.is_switch else ""
    takes = option.takes.replace("|", "\\|")
    return (
        f"| `{option.flag}`{switch} | `{option.variable}` | `{option.key}` | `{option.default_text}` "
        f"| {option.help} Takes {takes}. |"
    )


def page_section(group: str) -> str:
    match = re.search(rf"^## {group}\n(.*?)(?=^## |\Z)", CONFIGURATION.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert match, f"docs/configuration.md has no section '## {group}'"
    return match[1]


@pytest.mark.parametrize("option", options(), ids=lambda o: o.flag)
def test_every_setting_is_in_its_group_on_the_page(option: Option) -> None:
    expected = row(option)
    assert expected in page_section(option.group), f"put this line there:\n{expected}"


def test_every_option_has_a_known_group() -> None:
    assert {option.group for option in options()} == set(GROUPS)


def test_the_page_names_no_flag_and_no_variable_that_does_not_exist() -> None:
    text = CONFIGURATION.read_text("utf-8")
    flags = {flag for action in make_parser()._actions for flag in action.option_strings}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= flags
    variables = {option.variable for option in options()} | {"ROUTER_CONFIG"}
    kubernetes = {"ROUTER_SERVICE_HOST"}
    assert set(re.findall(r"ROUTER_[A-Z_]+", text)) <= variables | kubernetes


def test_flags_of_the_parser_that_are_no_settings_are_on_the_page() -> None:
    text = CONFIGURATION.read_text("utf-8")
    for flag in ("--config", "--help", "--version", "ROUTER_CONFIG"):
        assert f"`{flag}" in text


def test_every_metric_is_on_its_page_and_no_other() -> None:
    if importlib.util.find_spec("router.metrics") is None:
        pytest.skip("router.metrics does not exist yet")
    registry: CollectorRegistry = importlib.import_module("router.metrics").Metrics().registry
    names = {family.name for family in registry.collect() if family.name.startswith("router_")}
    assert METRICS.exists(), f"docs/metrics.md is missing; it must name: {', '.join(sorted(names))}"
    text = METRICS.read_text("utf-8")
    documented = set(re.findall(r"`(router_[a-z0-9_]+)", text))
    assert names <= {re.sub(r"_total$", "", name) for name in documented}
    suffixes = "_total|_bucket|_sum|_count"
    assert {re.sub(rf"({suffixes})$", "", name) for name in documented} <= names
