"""The store as an operator names it."""

from __future__ import annotations

import pytest

from router.store.spec import StoreSpec, read_store


@pytest.mark.parametrize(
    ("stated", "rpc"),
    [
        ("http://10.0.0.5:9003", "10.0.0.5:50051"),
        ("http://[fd00::5]:9003", "[fd00::5]:50051"),
        ("http://master:9003,copy=5,rpc=other:17", "other:17"),
    ],
)
def test_the_masters_rpc_is_on_its_host_unless_stated(stated: str, rpc: str) -> None:
    spec = read_store(stated)
    assert isinstance(spec, StoreSpec)
    assert spec.rpc_address == rpc
