"""Whoever waits for the first start is told why."""

from __future__ import annotations

import logging
import threading

import pytest

from indexer import jit
from publishers.compiling import _log_after, _log_why


def test_what_takes_long_is_told_of_while_it_lasts() -> None:
    told = threading.Event()
    with _log_after(0.0, told.set):
        assert told.wait(10)


def test_what_is_over_soon_is_not() -> None:
    told = threading.Event()
    with _log_after(3600.0, told.set):
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for timer in timers:
        timer.join(10)
    assert timers
    assert not any(timer.is_alive() for timer in timers)
    assert not told.is_set()


def test_what_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _log_why()
    assert "first start" in caplog.text


def test_where_nothing_can_be_kept_no_first_start_is_promised(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "_not_kept", ["kernel"])
    with caplog.at_level(logging.INFO):
        _log_why()
    assert "every start" in caplog.text
    assert "first start" not in caplog.text
