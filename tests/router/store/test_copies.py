"""Which objects are copied, and where to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engines.store import Segment, Stored
from indexer.types import Tier
from router.store.copies import Copy, StoreCopies, busy_hosts, choose, host_of
from router.store.mooncake_client import MooncakeClient
from router.store.shared_store import SharedStore
from router.workers.fleet import Fleet

BUSY = frozenset({"busy", "b2"})
SEGMENTS = [
    Segment("name-busy", "busy:1", 100, 0),
    Segment("name-b2", "b2:1", 100, 0),
    Segment("name-full", "full:1", 100, 95),
    Segment("name-free", "free:1", 100, 40),
    Segment("name-free-too", "free-too:2", 100, 45),
]


def at(*owners: str, size: int = 10) -> Stored:
    return Stored(size, Tier.CPU, owners)


@pytest.mark.parametrize(
    ("loads", "busy"),
    [
        ({}, set()),
        ({"a": 7.0}, set()),
        ({"a": 0.0, "b": 0.0}, set()),
        ({"a": 3.0, "b": 3.0}, set()),
        ({"a": 3.0, "b": 1.0}, {"a"}),
        ({"a": 9.0, "b": 8.0, "c": 1.0}, {"a", "b"}),
    ],
)
def test_busy_is_whoever_has_more_to_do_than_the_mean(loads: dict[str, float], busy: set[str]) -> None:
    assert busy_hosts(loads) == busy


@pytest.mark.parametrize(
    ("stored", "to"),
    [
        (at("busy:1"), "name-free"),
        (at("busy:9"), "name-free"),
        (at("free-too:2"), None),
        (at("busy:1", "free-too:2"), None),
        (at("busy:1", "b2:1"), None),
        (at("elsewhere:3"), None),
        (at(), None),
        (at("busy:1", size=60), "name-free"),
        (at("busy:1", size=61), None),
    ],
    ids=[
        "alone",
        "no segment",
        "not busy",
        "two",
        "two busy",
        "unknown",
        "on disk",
        "fits",
        "too large",
    ],
)
def test_what_lies_on_one_busy_host_goes_where_there_is_most_room(stored: Stored, to: str | None) -> None:
    assert list(choose({"k": stored}, SEGMENTS, BUSY)) == ([Copy("k", to)] if to else [])


def test_room_that_is_given_away_is_gone() -> None:
    objects = {f"k{number}": at("busy:1") for number in range(12)}
    copies = list(choose(objects, SEGMENTS, BUSY))
    assert [copy.key for copy in copies] == [f"k{number}" for number in range(11)], "the last one fits nowhere"
    assert [copy.segment for copy in copies].count("name-free") == 6
    assert [copy.segment for copy in copies].count("name-free-too") == 5


def test_nowhere_to_go() -> None:
    assert not list(choose({"k": at("busy:1")}, SEGMENTS[:2], BUSY))


@pytest.mark.parametrize(("endpoint", "host"), [("10.0.0.1:7", "10.0.0.1"), ("[fd00::1]:7", "fd00::1"), ("h:7", "h")])
def test_hosts_are_written_as_workers_are(endpoint: str, host: str) -> None:
    assert host_of(endpoint) == host


class _TooLong(SharedStore):
    """Three hot prefixes, each of more objects than may be copied, and what they are called."""

    def __init__(self) -> None:
        self.named = 0

    def hottest_prompts(self, _: int) -> list[tuple[str, Any, Any]]:
        return [("m", self, None)] * 3

    def keys_of_prompt(self, _: None) -> list[str]:
        self.named += 1
        return ["a", "b"]


async def test_others_run_between_the_naming_of_two_prefixes() -> None:
    """It takes milliseconds each, and there are dozens."""
    store, seen = _TooLong(), set()
    round_ = asyncio.create_task(
        StoreCopies(store, Fleet([]), lambda _: 0, MooncakeClient("127.0.0.1:1"), 1)._hottest()
    )
    while not round_.done():
        seen.add(store.named)
        await asyncio.sleep(0)
    assert seen == {0, 1, 2, 3}
