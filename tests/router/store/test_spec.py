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


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ("http://m:9003,hash=xxhash", "the store's hash takes sha256 or sha256_cbor, not 'xxhash'."),
        ("http://m:9003,tp=0", "the store's tp takes a whole number of at least 1, not '0'."),
        ("http://m:9003,keep=-1", "the store's keep takes a whole number of at least 0, not '-1'."),
        ("http://m:9003,pp=2,budget_ms=0", "the store's budget_ms takes a number of milliseconds above 0, not '0'."),
        ({"url": "http://m:9003", "hash_seed": 0}, "the store's hash_seed takes text, in quotes, not 0."),
        ({"url": "http://m:9003", "model": ["m"]}, "the store's model takes text, in quotes, not ['m']."),
        ({"url": 5}, "the store's url is that of the master's metrics port, such as http://10.0.0.5:9003."),
    ],
)
def test_a_wrong_value_is_told_with_what_its_key_takes(stated: object, told: str) -> None:
    with pytest.raises(ValueError, match="store") as raised:
        read_store(stated)
    assert str(raised.value) == told
