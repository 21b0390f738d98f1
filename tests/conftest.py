"""Hypothesis as CI needs it: the same examples every time, and no deadline that a busy machine could miss. And what stays
is out of the garbage collector's way."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

gc.disable()  # until all is collected, of which nothing is garbage: looking takes a second


def pytest_collection_finish() -> None:
    """Thousands of tests and their modules stay: each look through them would take 0.2 s, at whatever test it is."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a file's tests leave as garbage is collected at their end, where it is told of; what is left then stays, such
    as what pytest and Hypothesis remember of each test, and is looked through no more: that took a tenth of all time."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
