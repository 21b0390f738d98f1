from itertools import permutations, zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import chain_hashes, pack_tokens, root_hash
from indexer.types import PLAIN, Namespace

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def hashes(ids: list[int], size: int, root: int = 0, extras: tuple[bytes, ...] = ()) -> list[int]:
    found: list[int] = chain_hashes(pack_tokens(ids), size, root, extras).tolist()
    return found


def reference(ids: list[int], size: int, root: int) -> list[int]:
    """In plain integers: a keyed sum of a block's pairs of tokens, and MurmurHash3's finaliser."""
    word = (1 << 64) - 1

    def keyed(pair: int, low: int, high: int) -> int:
        key = 0x4CF5AD432745937F + pair * 0x3C6EF372FE94F82A & word
        mixed = ((low | high << 32) ^ key) * 0x87C37B91114253D5 & word
        return (mixed ^ mixed >> 33) * key

    found = []
    for start in range(0, len(ids) - size + 1, size):
        block = ids[start : start + size]
        pairs = zip_longest(block[::2], block[1::2], fillvalue=0)
        root ^= sum(keyed(number, *pair) for number, pair in enumerate(pairs)) & word
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            root = (root ^ root >> 33) * multiplier & word
        root ^= root >> 33
        found.append(root)
    return found


def test_golden_values() -> None:
    """What publishers and routers agree on: a change here needs a new HASH_VERSION."""
    assert hashes([1, 2, 3, 4, 5], 2) == [1838773808892156667, 14793473291883430984]


@given(tokens, st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_compiled_is_as_written(ids: list[int], size: int, root: int) -> None:
    assert hashes(ids, size, root) == reference(ids, size, root)


def test_blocks_that_are_alike_have_hashes_that_are_not() -> None:
    """Two in 10^5 agree in half of their bits about as often as random numbers do (1.3 times), and in all never."""
    turned = [[token for token in order for _ in range(2)] for order in permutations(range(8))]
    few = [[number >> bit & 1 for bit in range(16)] for number in range(2**16)]
    found = np.array([hash_ for block in turned + few for hash_ in hashes(block, 16)], np.uint64)
    assert len(np.unique(found)) == len(found)
    for half in (found & np.uint64(2**32 - 1), found >> np.uint64(32)):
        assert len(found) - len(np.unique(half)) <= 10


@given(tokens, tokens, st.integers(1, 40))
def test_equal_hashes_mean_equal_prefixes(one: list[int], other: list[int], size: int) -> None:
    ours, theirs = hashes(one, size), hashes(other, size)
    assert len(ours) == len(one) // size
    for block, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (a == b) == (one[: block * size] == other[: block * size])


@given(tokens, st.integers(1, 20), st.integers(0, 10))
def test_a_chain_continues_from_any_block(ids: list[int], size: int, cut: int) -> None:
    whole = hashes(ids, size, 7)
    cut = min(cut, len(whole))
    head = hashes(ids[: cut * size], size, 7)
    tail = hashes(ids[cut * size :], size, head[-1] if head else 7)
    assert head + tail == whole


def test_namespaces_do_not_mix() -> None:
    spaces = [PLAIN, Namespace("a"), Namespace(None, "a"), Namespace("a", "b"), Namespace("ab"), Namespace(None, "ab")]
    spaces += [Namespace("", None), Namespace(None, ""), Namespace("", "")]
    roots = [root_hash(space) for space in spaces]
    assert len(set(roots)) == len(roots)
    assert root_hash(PLAIN) == 0


def test_extras_separate_equal_tokens_from_their_block_on() -> None:
    plain = hashes([0, 1, 2, 3, 4, 5], 2)
    image = hashes([0, 1, 2, 3, 4, 5], 2, 0, (b"", b"image-1", b""))
    assert image[0] == plain[0]
    assert not set(image[1:]) & set(plain[1:])


@pytest.mark.parametrize(("bad", "error"), [([-1], OverflowError), ([2**32], OverflowError), (["a"], TypeError)])
def test_what_is_no_token_id(bad: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        pack_tokens(bad)
