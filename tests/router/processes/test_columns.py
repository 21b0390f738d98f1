"""Columns of shared books: every process has the same for a rank, and no two ranks share one."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from indexer.types import WorkerRank
from router.processes.columns import Columns
from router.processes.member import map_memory, memory_size
from router.scheduling.places import NoPlace
from tests.examples import examples
from tests.router.scheduling.candidates import rank, repeatable

A, B, C = (rank(name) for name in "abc")
PROCESSES, COLUMNS = 3, 4


@pytest.fixture
def users() -> npt.NDArray[np.int64]:
    return np.zeros((2, 2), np.int64)


@pytest.fixture
def processes(users: npt.NDArray[np.int64]) -> Iterator[list[Columns]]:
    """Two, for two ranks at a time."""
    names = np.zeros(2, np.uint64)
    with tempfile.TemporaryFile() as file:
        yield [Columns(names, users, own, file.fileno()) for own in range(2)]


def test_a_column_is_a_ranks_in_each_process(processes: list[Columns]) -> None:
    first, second = processes
    assert (first.claim(A), second.claim(B), second.claim(A), first.claim(B)) == (0, 1, 0, 1)
    assert [first.rank_at(0), first.rank_at(1), first.rank_at(2)] == [A, B, None]
    assert [second.get(A), second.get(B), second.get(C)] == [0, 1, None]


def test_it_is_anothers_when_nobody_has_it_any_more(processes: list[Columns]) -> None:
    first, second = processes
    for process in processes:
        process.claim(A)
    first.claim(A)
    first.claim(B)
    with pytest.raises(NoPlace, match="more than the 2 that --processes can share"):
        second.claim(C)
    second.release(0)
    first.release(0)
    with pytest.raises(NoPlace, match="more than the 2 that --processes can share"):
        second.claim(C)
    first.release(0)
    assert first.rank_at(0) is None
    assert second.claim(C) == 0
    assert first.claim(C) == 0


def test_what_a_lost_process_had_is_free(processes: list[Columns], users: npt.NDArray[np.int64]) -> None:
    first, second = processes
    first.claim(A)
    first.claim(B)
    users[0] = 0  # as its parent does
    assert second.claim(C) == 0


class Sharing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 -- until `teardown`
        names, users = np.zeros(COLUMNS, np.uint64), np.zeros((PROCESSES, COLUMNS), np.int64)
        self.processes = [Columns(names, users, own, self.file.fileno()) for own in range(PROCESSES)]
        self.held: list[tuple[int, WorkerRank, int]] = []

    def teardown(self) -> None:
        self.file.close()

    @rule(process=st.integers(0, PROCESSES - 1), name=st.sampled_from("abcdef"))
    def claim(self, process: int, name: str) -> None:
        in_use = {each for _, each, _ in self.held}
        if rank(name) in in_use or len(in_use) < COLUMNS:
            self.held.append((process, rank(name), self.processes[process].claim(rank(name))))
        else:
            with pytest.raises(NoPlace):
                self.processes[process].claim(rank(name))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        process, _, column = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.processes[process].release(column)

    @invariant()
    def each_has_its_own(self) -> None:
        columns = {each: column for _, each, column in self.held}
        assert len(set(columns.values())) == len(columns)
        for process, each, column in self.held:
            assert column == columns[each]
            assert self.processes[process].get(each) == column


TestSharing = Sharing.TestCase
TestSharing.settings = settings(repeatable, max_examples=examples(60), stateful_step_count=40)


def _claim(file: Path, own: int, many: int, together: Barrier, claimed: multiprocessing.Queue[list[int]]) -> None:
    with file.open("r+b") as memory:
        names, books, *_ = map_memory(memory.fileno(), PROCESSES, many)
        columns = Columns(names, books[:, 0, :-1], own, memory.fileno())
        ranks = [WorkerRank("w", number) for number in range(many)]
        together.wait()
        for each in ranks[own:] + ranks[:own]:
            columns.claim(each)
        claimed.put([columns.get(each) or 0 for each in ranks])


@pytest.mark.slow
def test_processes_that_claim_at_the_same_time_agree(tmp_path: Path) -> None:
    many, file = 1000, tmp_path / "memory"
    file.write_bytes(b"")
    with file.open("r+b") as memory:
        memory.truncate(memory_size(PROCESSES, many))
    context = multiprocessing.get_context("spawn")
    claimed: multiprocessing.Queue[list[int]] = context.Queue()
    together = context.Barrier(PROCESSES)
    started = [context.Process(target=_claim, args=(file, own, many, together, claimed)) for own in range(PROCESSES)]
    for process in started:
        process.start()
    found = [claimed.get(timeout=60.0) for _ in started]
    for process in started:
        process.join()
    assert found[0] == found[1] == found[2]
    assert sorted(found[0]) == list(range(many))
