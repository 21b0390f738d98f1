"""Which candidates have room under the limits, whole or in two parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from indexer.types import WorkerRank
from router.scheduling.candidates import Candidates, Split
from router.scheduling.limits import Limits
from router.scheduling.load import LoadBook
from router.scheduling.room import Room, Roomy
from tests.router.scheduling.candidates import named, rank


def booked(candidates: Iterable[WorkerRank], requests: Mapping[str, int]) -> LoadBook:
    """So many at each worker, on its first rank."""
    book = LoadBook()
    for each in candidates:
        book.watch(each, 16)
    for name, count in requests.items():
        for _ in range(count):
            book.reserve(rank(name), 0, 10)
    return book


def names(candidates: Candidates) -> str:
    return "".join(each.worker_id for each in candidates.ranks)


def test_a_full_worker_is_left_out_and_where_the_others_were_is_known() -> None:
    candidates = named("abc")
    room = Room(Limits(max_worker_concurrency=2), booked(candidates.ranks, {"b": 2, "c": 1}))
    found = room.find(candidates, 0.0)
    assert found
    assert (names(found.candidates), found.whole.tolist()) == ("ac", [0, 2])
    assert room.find(candidates, 0.0) is found, "the index remembers where the ranks of each set are"
    ahead = {candidates: np.array([1.0, 2.0, 3.0])}
    assert {some: works.tolist() for some, works in found.of(candidates, ahead).items()} == {
        found.candidates: [1.0, 3.0]
    }


def test_all_ranks_of_a_worker_count_together() -> None:
    candidates = Candidates([(rank("a", 0), 16), (rank("a", 1), 16), (rank("b"), 16)])
    book = booked(candidates.ranks, {"a": 1})
    book.reserve(rank("a", 1), 0, 10)
    found = Room(Limits(max_worker_concurrency=2), book).find(candidates, 0.0)
    assert found
    assert names(found.candidates) == "b"


@pytest.mark.parametrize("limits", [Limits(max_worker_concurrency=1), Limits(max_concurrency=2)])
def test_nobody_has_room(limits: Limits) -> None:
    candidates = named("ab")
    assert Room(limits, booked(candidates.ranks, {"a": 1, "b": 1})).find(candidates, 0.0) is None


def test_the_limit_in_all_counts_workers_that_are_no_candidates_too() -> None:
    room = Room(Limits(max_concurrency=3), booked(named("abc").ranks, {"a": 1, "b": 2}))
    assert room.find(named("c"), 0.0) is None


def test_where_all_have_room_they_are_the_candidates_themselves() -> None:
    candidates = named("ab")
    for limits in (Limits(), Limits(max_concurrency=2), Limits(max_worker_concurrency=1)):
        found = Room(limits, booked(candidates.ranks, {})).find(candidates, 0.0)
        assert found
        assert found.candidates is candidates


def test_what_is_known_of_those_that_are_left_stays() -> None:
    candidates = Candidates([(rank("a"), 16), (rank("b"), 32), (rank("c"), 64)], without_store=[rank("b")])
    found = Room(Limits(max_worker_concurrency=1), booked(candidates.ranks, {"a": 1})).find(candidates, 0.0)
    assert found
    assert (found.candidates.block_sizes.tolist(), found.candidates.uses_store.tolist()) == ([32, 64], [False, True])


def parted(whole: str, prefills: str, decodes: str) -> Candidates:
    targets, count = named(decodes), len(prefills)
    near = np.array([name == "x" for name in decodes])
    split = Split(named(prefills), (targets,) * count, (near,) * count, tuple(name == "p" for name in prefills))
    return Candidates(((rank(name), 16) for name in whole), split)


def found_in(candidates: Candidates, requests: Mapping[str, int]) -> Roomy | None:
    everybody = [rank(name) for name in "awpqxy"]
    return Room(Limits(max_worker_concurrency=1), booked(everybody, requests)).find(candidates, 0.0)


def test_either_part_needs_room() -> None:
    candidates = parted("aw", "pq", "xy")
    found = found_in(candidates, {"a": 1, "p": 1, "x": 1})
    assert found
    split = found.candidates.split
    assert split
    assert (names(found.candidates), names(split.prefills), names(split.decodes[0])) == ("w", "q", "y")
    assert (split.near[0].tolist(), split.pushes) == ([False], (False,))
    assert (found.whole.tolist(), found.prefills.tolist()) == ([1], [1])
    assert candidates.split
    ahead = {candidates.split.prefills: np.array([1.0, 2.0])}
    assert [works.tolist() for works in found.of(candidates, ahead).values()] == [[2.0]]


@pytest.mark.parametrize("whole", ["", "a"])
def test_pairs_with_room_stay_whether_or_not_others_serve_requests_whole(whole: str) -> None:
    found = found_in(parted(whole, "pq", "xy"), {"p": 1, "x": 1})
    assert found
    split = found.candidates.split
    assert split
    assert (names(found.candidates), names(split.prefills), names(split.decodes[0])) == (whole, "q", "y")


@pytest.mark.parametrize("full", ["pq", "xy"])
def test_without_room_for_one_part_it_goes_whole_or_waits(full: str) -> None:
    requests = dict.fromkeys(full, 1)
    found = found_in(parted("a", "pq", "xy"), requests)
    assert found
    assert (names(found.candidates), found.candidates.split) == ("a", None)
    assert found_in(parted("", "pq", "xy"), requests) is None


def test_what_is_prefilled_goes_on_even_where_nobody_has_room() -> None:
    split = parted("", "pq", "xy").split
    assert split
    for requests, expected in (({"x": 1}, "y"), ({"x": 1, "y": 1}, "xy"), ({}, "xy")):
        room = Room(Limits(max_worker_concurrency=1), booked([rank("x"), rank("y")], requests))
        found = room.decodes(split, 0.0)
        assert [names(each) for each in found.decodes] == [expected] * 2
        assert [len(near) for near in found.near] == [len(expected)] * 2
