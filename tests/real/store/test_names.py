"""What we call a prompt's blocks is what real engines call them in a real store; without a router."""

from __future__ import annotations

import aiohttp
import pytest

from engines.store import bytes_per_token, verify
from indexer.types import Namespace, Tier
from router.store.master import StoreMaster
from tests.real.pd.requests import directly, telling
from tests.real.prompts import ids

from .members import Master, Member, until_stored

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

TOKENS = 428
CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "dtype": "float32",
}


@pytest.mark.parametrize("salt", [None, "tenant é"], ids=["plain", "salted"])
def test_blocks_of_one_worker_are_found_and_loaded_by_another(
    master: Master, a: Member, b: Member, salt: str | None
) -> None:
    prompt = ids(f"names {salt}", TOKENS)
    body = telling("ids", "names") | {"prompt": prompt} | ({"cache_salt": salt} if salt else {})
    keys = a.keys(prompt, Namespace(cache_salt=salt))
    assert len(keys) == TOKENS // a.block
    assert master.held(keys) == {}
    computed = directly(a, body)
    held = until_stored(master, keys)
    assert {stored.tier for stored in held.values()} == {Tier.CPU}
    segments = {segment.endpoint: segment for segment in master.segments()}
    for stored in held.values():  # on any member's segment, not only its own
        [owner] = stored.owners
        assert segments[owner].used >= stored.size
    fetched = directly(b, body)
    assert (computed.reported, fetched.reported) == (0, len(keys) * a.block)
    assert fetched.token_ids == computed.token_ids


def test_store_looks_as_expected(master: Master, a: Member) -> None:
    directly(a, telling("ids", "looks"))
    until_stored(master, a.keys(telling("ids", "looks")["prompt"]))
    verdict = verify(master.keys(), a.layout)
    assert verdict.agrees, verdict.why


def test_block_is_as_large_as_the_model_says(master: Master, a: Member) -> None:
    directly(a, telling("ids", "looks"))
    held = until_stored(master, a.keys(telling("ids", "looks")["prompt"]))
    token = bytes_per_token(CONFIG)
    assert token is not None
    assert {stored.size for stored in held.values()} == {token * a.block}


async def test_leases_are_taken_of_what_is_there(master: Master, a: Member) -> None:
    directly(a, telling("ids", "looks"))
    keys = a.keys(telling("ids", "looks")["prompt"])
    until_stored(master, keys)
    missing = [key[:-4] + "beef" for key in keys]
    async with aiohttp.ClientSession() as session:
        asked = StoreMaster(master.url, session)
        assert [await asked.lease(key) for key in [*keys, *missing]] == [True] * len(keys) + [False] * len(missing)
        assert await asked.present([*keys, *missing]) == set(keys)
        asked.close()
