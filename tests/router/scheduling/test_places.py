"""Places against a plain model: whoever has one keeps it, and nobody shares one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from indexer.types import RankSet, WorkerRank
from router.scheduling.places import _MAX_SETS, Places
from tests.examples import examples
from tests.router.scheduling.candidates import rank, repeatable

RANKS = [rank(name, number) for name in "abc" for number in range(3)]
SETS = [RankSet(RANKS), RankSet(reversed(RANKS)), RankSet(RANKS[::2]), RankSet([])]


class Sharing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.places = Places()
        self.given: dict[WorkerRank, int] = {}
        self.dropped: list[int] = []
        self.most = 0

    @rule(each=st.sampled_from(RANKS))
    def add(self, each: WorkerRank) -> None:
        had = self.given.get(each)
        place = self.places.add(each)
        assert had is None or place == had
        assert place not in self.dropped, "given away before it was freed"
        self.given[each] = place
        self.most = max(self.most, len(self.given) + len(self.dropped))

    @rule(each=st.sampled_from(RANKS))
    def drop(self, each: WorkerRank) -> None:
        place = self.places.drop(each)
        assert place == self.given.pop(each, None)
        if place is not None:
            self.dropped.append(place)

    @precondition(lambda self: self.dropped)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.dropped))
        self.dropped.remove(place)
        self.places.free(place)

    @invariant()
    def each_has_its_own(self) -> None:
        assert self.places.ranks() == self.given
        assert len({*self.given.values(), *self.dropped}) == len(self.given) + len(self.dropped)
        assert max(self.given.values(), default=-1) < self.most, "no more than were ever in use at a time"
        assert all(self.places.get(each) == self.given.get(each) for each in RANKS)
        for ranks in (*SETS, RankSet(RANKS)):
            assert self.places.of(ranks).tolist() == [self.given.get(each, -1) for each in ranks.ranks]


TestSharing = Sharing.TestCase
TestSharing.settings = settings(repeatable, max_examples=examples(60), stateful_step_count=30)


def test_places_may_be_given_by_somebody_else() -> None:
    released: list[int] = []
    places = Places({RANKS[0]: 7, RANKS[1]: 3}.__getitem__, released.append)
    assert [places.add(RANKS[0]), places.add(RANKS[1]), places.add(RANKS[0])] == [7, 3, 7]
    assert places.of(RankSet(RANKS[:3])).tolist() == [7, 3, -1]
    places.free(places.drop(RANKS[1]) or 0)
    assert released == [3]
    assert places.of(RankSet(RANKS[:3])).tolist() == [7, -1, -1]
    assert places.add(RANKS[1]) == 3


def test_sets_are_not_remembered_without_end() -> None:
    places = Places()
    for each in RANKS:
        places.add(each)
    for _ in range(3 * _MAX_SETS):
        assert places.of(RankSet(RANKS)).tolist() == list(range(len(RANKS)))
        assert len(places._known) <= _MAX_SETS
