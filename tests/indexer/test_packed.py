"""A large table is laid out page by page before it is used."""

from __future__ import annotations

import numpy as np

from indexer.hashing import SequenceHashes
from indexer.packed import PackedTable

PART = 1024
"""Hashes stored at a time, for which one page is laid out."""


def hashes(first: int) -> SequenceHashes:
    """Spread as hashes are, and unlike those of any other `first`."""
    return np.arange(first + 1, first + PART + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def is_held(table: PackedTable, first: int) -> bool:
    masks = np.zeros((PART, table.words), np.uint64)
    table.mark(hashes(first), masks)
    return bool(masks.all())


def test_pages_are_written_to_one_at_a_time_before_anything_is_stored_in_them() -> None:
    table, sizes, laid = PackedTable(), [0], list[list[int]]()
    for first in range(0, 600 * PART, PART):
        table.store(0, hashes(first))
        assert is_held(table, first), first
        assert is_held(table, 0), first
        if len(table._table) != sizes[-1]:
            sizes.append(len(table._table))
            laid.append([])
        if table._laying:
            laid[-1].append(table._laid)
    page = min(each for pages in laid for each in pages)
    huge = [(size, pages) for size, pages in zip(sizes[2:], laid, strict=False) if size >= 4 * page]
    assert len(huge) > 1
    for size, pages in huge:
        assert pages == list(range(page, size, page)), size
    for first in range(0, 600 * PART, PART):
        assert is_held(table, first)
    assert len(table) == 600 * PART


def test_what_a_rank_held_is_gone_though_the_next_table_is_not_ready() -> None:
    table = PackedTable()
    for first in range(0, 300 * PART, PART):
        table.store(0, hashes(first))
        table.store(1, hashes(first))
    while table._migrating or table._laying:
        table.go_on(PART)
    table.condemn(0)
    assert (table._laying, table.freed) == (True, set())
    for _ in range(2000):
        table.go_on(PART)
    assert table.freed == {0}
    assert (table.count(0), table.count(1), len(table)) == (0, 300 * PART, 300 * PART)
    assert [slot for slot, _ in table.dump()] == [1]


def test_ranks_that_leave_at_once_are_swept_out_one_after_the_other() -> None:
    table = PackedTable()
    for slot in range(3):
        table.store(slot, hashes(0)[:50])
    table.condemn(0)
    table.condemn(1)
    for _ in range(20):
        table.go_on(PART)
    assert table.freed == {0, 1}
    assert [slot for slot, _ in table.dump()] == [2]


def test_also_where_memory_is_short_and_the_table_turns_over_again_and_again() -> None:
    table, page, turns, unready = PackedTable(lambda: 48 << 20), 2**18, 0, 0
    before, laid = table._table, 0
    for first in range(0, 4000 * PART, PART):
        table.store(0, hashes(first))
        assert is_held(table, first), first
        if table._table is not before and len(table._table) >= 4 * page:
            unready += laid + page < len(table._table)
            turns += 1
        before, laid = table._table, table._laid if table._laying else 0
    assert unready < turns / 10, turns  # one may be needed at once
    assert turns > 10
    assert (table.evicted > 0, table.refused) == (True, 0)
