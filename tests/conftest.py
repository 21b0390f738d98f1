"""Hypothesis as CI needs it: the same examples every time, and no deadline that a busy machine could miss. And what is
collected is out of the garbage collector's way."""

import gc

from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

gc.disable()  # until all is collected, of which nothing is garbage: looking takes a second


def pytest_collection_finish() -> None:
    """Thousands of tests and their modules stay: each look through them would take 0.2 s, at whatever test it is."""
    gc.freeze()
    gc.enable()
