"""Flags that do nothing are known, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from router.settings import Settings
from router.unheeded import unheeded


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"kv_policy": "overlap", "router_temperature": 0.5}, []),
        ({"router_mode": "random", "kv_policy": "overlap"}, ["--kv-policy"]),
        (
            {"router_mode": "random", "kv_overlap_score_weight": 0.0, "router_temperature": 0.5},
            ["--kv-overlap-score-weight", "--router-temperature"],
        ),
        ({"router_mode": "random", "kv_policy": "overlap", "ab": "kv:1,random:1"}, []),
        ({"router_mode": "random", "kv_policy": "overlap", "ab": "random:1,round-robin:1"}, ["--kv-policy"]),
        ({"router_mode": "random"}, []),
        ({"tenant_header": "x-tenant"}, []),
        ({"api_keys": "keys.yaml"}, []),
        ({"tenant_header": "x-tenant", "api_keys": "keys.yaml"}, ["--tenant-header"]),
    ],
)
def test_flags_that_do_nothing_beside_the_others(settings: dict[str, Any], flags: list[str]) -> None:
    assert list(unheeded(Settings(**settings))) == flags


def test_the_reason_names_the_flag_that_decides() -> None:
    found = unheeded(Settings(router_mode="random", kv_policy="overlap", tenant_header="x", api_keys="keys.yaml"))
    assert "--router-mode kv" in found["--kv-policy"]
    assert "--api-keys" in found["--tenant-header"]
