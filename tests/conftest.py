"""Hypothesis as CI needs it: the same examples every time, and no deadline that a busy machine could miss."""

from hypothesis import HealthCheck, settings

settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
