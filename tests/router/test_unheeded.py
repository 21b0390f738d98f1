"""Flags that do nothing are known, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from router.settings import Settings
from router.settings.administration import Address
from router.store.spec import StoreSpec
from router.unheeded import unheeded
from router.workers.spec import parse_worker

PLAIN = parse_worker("http://a:1")
TELLS = parse_worker("http://a:1,events=tcp://a:5557")


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
        ({"router_mode": "random", "tokenizer": "engine"}, ["--tokenizer"]),
        ({"router_mode": "random", "tokenizer": "engine", "ab": "kv:1,random:1"}, []),
        ({"tokenizer": "engine", "ab": "round-robin:1,random:1"}, ["--tokenizer"]),
        ({"router_mode": "random", "approx_ttl": 9.0}, ["--approx-ttl"]),
        ({"router_mode": "direct", "migration_limit": 2}, ["--migration-limit"]),
        ({"router_mode": "random", "migration_limit": 2, "approx_ttl": 120.0}, []),
        ({"send_token_ids": True}, []),
        ({"send_token_ids": True, "tokenizer": "engine"}, ["--send-token-ids"]),
        ({"slo_patience": 3.0, "ttft_slo": 1.0}, ["--slo-patience"]),
        ({"slo_patience": 3.0, "slo_action": "queue"}, []),
        ({"slo_patience": 61.0, "slo_action": "queue"}, ["--slo-patience"]),
        ({"slo_patience": 60.0, "slo_action": "queue"}, []),
        ({"slo_patience": 61.0, "slo_action": "queue", "queue_timeout": 90.0}, []),
        ({"router_mode": "random", "index_max_memory": 2**30}, ["--index-max-memory"]),
        ({"router_mode": "random", "index_max_memory": 2**30, "ab": "kv:1,random:1"}, []),
        ({"index_max_memory": 2**30, "ab": "random:1,round-robin:1"}, ["--index-max-memory"]),
        ({"workers": (TELLS,)}, []),
        ({"workers": (TELLS,), "kv_events": False}, ["--worker …,events="]),
        ({"workers": (PLAIN, TELLS), "router_mode": "random"}, ["--worker …,events="]),
        ({"workers": (TELLS,), "router_mode": "random", "ab": "kv:1,random:1"}, []),
        ({"max_body_size": 2**31}, ["--max-body-size"]),
        ({"max_body_size": 2**31, "max_buffered": 2**31}, []),
        ({"max_buffered": 2**20}, []),
        ({"event_namespace": "blue"}, ["--event-namespace"]),
        ({"event_namespace": "blue", "event_plane": "nats://broker"}, []),
        ({"event_host": ("10.0.0.7",), "event_plane": "nats://broker"}, ["--event-host"]),
        ({"event_host": ("10.0.0.7",)}, []),
        (
            {"workers": (PLAIN,), "worker_ca": "a", "worker_cert": "b", "worker_key": "c"},
            ["--worker-ca", "--worker-cert"],
        ),
        ({"workers": (PLAIN, parse_worker("https://b:1")), "worker_ca": "a"}, []),
        ({"workers": (PLAIN,), "worker_ca": "a", "store": StoreSpec(url="https://master:9003")}, []),
        ({"workers": (PLAIN,), "worker_ca": "a", "admin_listen": Address("127.0.0.1", 0)}, []),
    ],
)
def test_flags_that_do_nothing_beside_the_others(settings: dict[str, Any], flags: list[str]) -> None:
    assert list(unheeded(Settings(**settings))) == flags


def test_the_reason_names_the_flag_that_decides() -> None:
    found = unheeded(Settings(router_mode="random", kv_policy="overlap", tenant_header="x", api_keys="keys.yaml"))
    assert "--router-mode kv" in found["--kv-policy"]
    assert "--ab has none" in unheeded(Settings(tokenizer="engine", ab="random:1,random:1"))["--tokenizer"]
    assert "--api-keys" in found["--tenant-header"]
