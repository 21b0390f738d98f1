"""What the page tells of requests that failed and of what could not be measured."""

from __future__ import annotations

import pytest

from scripts.bench import latency, measure
from scripts.bench.load import Outcome
from scripts.bench.measure import Effort
from scripts.bench.proxies import Findings, nothing
from scripts.bench.report import Results, page
from scripts.bench.routers import Running

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
