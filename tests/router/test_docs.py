"""The reference pages name everything there is, and nothing that there is not."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import NamedTuple, cast, get_args

import aiohttp
import pytest

from engines.rank_load import RankLoad
from indexer.cursor import View
from indexer.kv_indexer import KVIndexer
from indexer.types import Tier
from publishers.local_plane import LocalPlane
from router.arms import Arms
from router.cli import make_parser
from router.events.index_audit import IndexAudit
from router.metrics.gauges import Gauges
from router.metrics.registry import Metrics
from router.migration.migrating import OUTCOMES, Migrations
from router.proxy.outcome import End
from router.scheduling.load import LoadBook
from router.security.guard import Reason as Denial
from router.settings import GROUPS, Option, options
from router.store.copies import StoreCopies
from router.store.mooncake_client import MooncakeClient
from router.store.shared_store import SharedStore
from router.store.spec import StoreSpec
from router.tokens.errors import Reason
from router.workers.fleet import Fleet
from router.workers.status import RankStatus, WorkerStatus

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


def test_every_header_of_the_routers_own_is_on_the_page() -> None:
    """But for the one by which routers know what comes back to them."""
    sources = (path.read_text("utf-8") for path in (DOCS.parent / "router").rglob("*.py"))
    headers = {name for source in sources for name in re.findall(r"\bx-router-[a-z-]+[a-z]", source)} - {"x-router-via"}
    assert len(headers) > 5, "they are found at all"
    assert headers <= set(re.findall(r"`(x-router-[a-z-]+)`", CONFIGURATION.read_text("utf-8").lower()))


class Documented(NamedTuple):
    kind: str
    labels: tuple[str, ...]


def registered() -> dict[str, Documented]:
    """Every metric by the name under which it is exposed."""
    metrics = Metrics()
    Gauges(Fleet([]), LoadBook(), KVIndexer(), LocalPlane(), lambda: 0.0).register(metrics)
    IndexAudit(KVIndexer(), lambda _: None, has_store=False).register(metrics)
    metrics.registry.register(Arms([], [], None, random.Random(0)))
    metrics.registry.register(Migrations(1, Fleet([]), lambda _: None))
    nobody = cast("aiohttp.ClientSession", None)
    store = SharedStore(StoreSpec(url="http://h:1"), Fleet([]), nobody, lambda: 0.0)
    metrics.registry.register(store)
    metrics.registry.register(StoreCopies(store, Fleet([]), lambda _: 0, MooncakeClient("h:1"), 1))
    found = {}
    for collector in metrics.registry._collector_to_names:
        # One of prometheus_client's own knows its labels itself, ours say them with each family.
        own = getattr(collector, "_labelnames", None)
        for family in collector.collect():
            labels = getattr(family, "_labelnames", ()) if own is None else own
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert name not in found, "two metrics of one name"
            found[name] = Documented(family.type, tuple(labels))
    return found


def documented() -> dict[str, Documented]:
    rows = re.findall(
        r"^\| `((?:router|process)_\w+)` \| (\w+) \| ([\w, ]*?) ?\|", METRICS.read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) == len({name for name, *_ in rows}), "a metric is listed twice"
    return {name: Documented(kind, tuple(labels.split(", ")) if labels else ()) for name, kind, labels in rows}


@pytest.mark.parametrize("name", [*WorkerStatus.__struct_fields__, *RankStatus.__struct_fields__])
def test_what_ready_shows_is_explained(name: str) -> None:
    assert re.search(rf"^\| .*`{name}`.* \| .+ \|$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)


def test_every_metric_is_listed_with_its_type_and_labels_and_no_other() -> None:
    assert documented() == registered()


def test_what_is_registered_is_found_here() -> None:
    """Of each kind of collector one, so that the comparison above is with something."""
    found = registered()
    assert found["router_requests_total"] == ("counter", ("worker", "status", "end"))
    assert found["router_decision_seconds"] == ("histogram", ())
    assert found["router_requests_in_flight"] == ("gauge", ())
    assert found["router_untokenized_requests_total"] == ("counter", ("reason",))
    assert found["router_index_blocks"] == ("gauge", ("worker", "dp_rank", "tier"))
    assert found["router_index_evicted_blocks_total"] == ("counter", ())
    assert found["process_open_fds"] == ("gauge", ())


def test_the_metrics_page_mentions_no_metric_that_does_not_exist() -> None:
    mentioned = set(re.findall(r"`((?:router|process)_[a-z0-9_]+)", METRICS.read_text("utf-8")))
    assert mentioned <= registered().keys()


@pytest.mark.parametrize(
    "value",
    [
        *(view.value for view in View),
        *(tier.name.lower() for tier in Tier),
        *get_args(Reason),
        *get_args(End),
        *get_args(Denial),
        *RankLoad.__struct_fields__,
        *OUTCOMES,
    ],
)
def test_every_value_of_a_fixed_label_is_explained(value: str) -> None:
    assert f"`{value}`" in METRICS.read_text("utf-8")


@pytest.mark.parametrize("flag", ["--approx-ttl", "--no-kv-events", "--kv-overlap-score-weight", "--tokenizer"])
def test_flags_that_the_metrics_page_advises_exist(flag: str) -> None:
    assert flag in METRICS.read_text("utf-8")
    assert flag in {name for action in make_parser()._actions for name in action.option_strings}
