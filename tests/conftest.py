"""Hypothesis' examples are the same every time, and what stays is out of the garbage collector's way."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.examples import register_profiles

register_profiles()
settings.load_profile("tests")  # another by --hypothesis-profile

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell's script; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is collected, of which nothing is garbage: looking takes a second


def pytest_collection_finish() -> None:
    """Thousands of tests and their modules stay: each look through them would take 0.2 s, at whatever test it is."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a file's tests leave as garbage is collected at their end, where it is told of. What is left then stays,
    such as what pytest and Hypothesis remember of tests: to look through it ever again took a tenth of all time."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
