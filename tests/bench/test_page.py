"""What the page tells of requests that failed and of what could not be measured."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from scripts.bench import latency, measure, proxies
from scripts.bench.__main__ import _attempt
from scripts.bench.load import Outcome
from scripts.bench.measure import Effort
from scripts.bench.proxies import Findings, nothing
from scripts.bench.report import Results, page
from scripts.bench.routers import Field, Running

ROUTER = Running("some router", "http://127.0.0.1:1", 1, "")


def _page(found: Findings) -> str:
    return page(Results(found, [], {}, "", ""))


def test_requests_that_failed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(router: Running, *_: str) -> Outcome:
        return Outcome(1000, 2 if router is ROUTER else 0, 1.0, 1.0, 0.1, 0.2)

    monkeypatch.setattr(measure, "load", load)
    monkeypatch.setattr(latency, "load", load)
    found = nothing()
    assert "- Requests that failed: none; there were 0\n" in _page(found)
    measure.cpu_per_request([ROUTER], "short", Effort(3, 0.0), found.sent)
    latency.added_latency([ROUTER], ROUTER.url, Effort(2, 0.0, quick=True), found.sent)
    told = "6 of some router (400 B prompts), 4 of some router (16 connections); there were 7,000"
    assert f"- Requests that failed: {told}\n" in _page(found)


def _field(name: str) -> Field:
    field = Field(ExitStack())
    field.running.append(ROUTER._replace(name=name))
    field.missing["ours"] = f"did not start beside {name}"
    return field


def test_what_fails_in_two_comparisons_is_told_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(router: Running, *_: str) -> Outcome:
        raise RuntimeError(f"{router.name} broke")

    monkeypatch.setattr(measure, "load", fail)
    found = nothing()
    for name in ("one", "another"):
        proxies._measure(_field(name), ["short"], Effort(1, 0.0, quick=True), found)
    lines = _page(found).splitlines()
    for name in ("one", "another"):
        assert f"- ours: did not start beside {name}" in lines
        assert f"- 400 B prompts, {name}: {name} broke" in lines


def test_a_router_that_is_gone_does_not_take_the_other_parts_with_it() -> None:
    found = nothing()
    gone = ROUTER._replace(pid=2**22 + 1)  # more than there can be
    assert _attempt("round-robin", found, lambda: measure.idle_cpu(gone, 0.0)) is None
    assert found.missing == ["round-robin: some router ended before it was asked anything"]
