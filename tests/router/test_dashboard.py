"""The dashboard asks for metrics that exist, of the kind that it takes them for, and can be put into any Grafana."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "configs" / "grafana-dashboard.json").read_text("utf-8"))
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COUNTED_AT_THE_START = "router_tokenizer_mismatches_total"
"""By the first scrape it may have all that it will ever have: a rate would show nothing."""
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def documented() -> dict[str, tuple[str, set[str]]]:
    """Every series' name: the metric's type, and its labels."""
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `((?:router|process)_\w+)` \| (\w+) \| ([\w, ]*?) ?\|", text, re.MULTILINE)
    return {
        name + suffix: (kind, {*labels.split(", "), "job", "instance", *(("le",) if suffix == "_bucket" else ())})
        for name, kind, labels in rows
        for suffix in SUFFIXES[kind]
    }


def expressions() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["query"] for variable in DASHBOARD["templating"]["list"])


SERIES = documented()


def test_every_metric_that_is_asked_for_exists() -> None:
    asked = {name for expression in expressions() for name in re.findall(r"\b(?:router|process)_\w+", expression)}
    assert asked <= SERIES.keys()
    assert len(asked) > 40, "they are found at all"


def test_every_metric_is_shown() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    names = set(re.findall(r"^\| `((?:router|process)_\w+)`", text, re.MULTILINE))
    asked = {name for expression in expressions() for name in re.findall(r"\b(?:router|process)_\w+", expression)}
    assert names - {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} == set()


@pytest.mark.parametrize("expression", sorted({*expressions()}))
def test_labels_and_rates_are_right(expression: str) -> None:
    for function, name, labels in re.findall(r"(\w+\()?\b((?:router|process)_\w+)(?:\{(.*?)\})?", expression):
        kind, known = SERIES[name]
        assert set(re.findall(r'(\w+)!?=~?"', labels)) <= known, name
        grows = kind in {"counter", "histogram"} and name != COUNTED_AT_THE_START
        assert grows == (function in {"rate(", "increase("}), name
    by = {label for group in re.findall(r" by \((.*?)\)", expression) for label in group.split(", ")}
    assert all(by <= SERIES[name][1] for name in re.findall(r"\b(?:router|process)_\w+", expression)), by
    assert expression.count("(") == expression.count(")")


def test_what_each_process_counts_of_the_same_events_is_not_added_up() -> None:
    """All processes, and all routers, hear of each block that a worker stores or removes."""
    fates = [each for each in expressions() if re.search(r"router_kv_(created|stored|evicted|expired)_", each)]
    assert len(fates) == 8
    assert all("max by (worker, tier) (rate(" in each for each in fates)


def test_every_panel_asks_whichever_source_is_picked() -> None:
    for panel in PANELS:
        assert panel["datasource"] == SOURCE
        assert all(target["datasource"] == SOURCE for target in panel["targets"]), panel["title"]
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource"
    assert "__inputs" not in DASHBOARD, "it is provisioned as it is"


def test_panels_have_names_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in DASHBOARD["panels"]):
        xs, ys = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in xs for y in ys}
        assert not cells & taken
        assert max(xs) < 24
        taken |= cells


def test_each_part_of_the_metrics_page_has_its_row() -> None:
    assert [row["title"] for row in ROWS] == [
        "Traffic",
        "Latency",
        "Routing quality",
        "Workers",
        "Index and events",
        "KV lifecycle",
        "Store",
        "Prefill and decode apart",
        "Overload",
        "Live A/B test",
        "The router itself",
    ]


def test_the_scrape_configuration_names_the_router() -> None:
    config = yaml.safe_load((ROOT / "configs" / "prometheus.yaml").read_text("utf-8"))
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert jobs["kv-router"] == ["127.0.0.1:8080"]
