import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import chain_hashes, pack_tokens, root_hash
from indexer.types import PLAIN, Namespace

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def test_golden_values() -> None:
    """The wire format of HASH_VERSION 1: a change here needs a new version."""
    packed = pack_tokens([1, 2, 3, 4, 5])
    assert packed == bytes.fromhex("0100000002000000030000000400000005000000")
    first = xxhash.xxh3_64_intdigest(packed[:8], 0)
    assert chain_hashes(packed, 2, 0) == [first, xxhash.xxh3_64_intdigest(packed[8:16], first)]
    assert chain_hashes(packed, 2, 0) == [254984204845929552, 26901709818789599]


@given(tokens, tokens, st.integers(1, 40))
def test_equal_hashes_mean_equal_prefixes(one: list[int], other: list[int], size: int) -> None:
    ours, theirs = chain_hashes(pack_tokens(one), size, 0), chain_hashes(pack_tokens(other), size, 0)
    assert len(ours) == len(one) // size
    for block, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (a == b) == (one[: block * size] == other[: block * size])


@given(tokens, st.integers(1, 20), st.integers(0, 10))
def test_a_chain_continues_from_any_block(ids: list[int], size: int, cut: int) -> None:
    whole = chain_hashes(pack_tokens(ids), size, 7)
    cut = min(cut, len(whole))
    head = chain_hashes(pack_tokens(ids[: cut * size]), size, 7)
    tail = chain_hashes(pack_tokens(ids[cut * size :]), size, head[-1] if head else 7)
    assert head + tail == whole


def test_namespaces_do_not_mix() -> None:
    spaces = [PLAIN, Namespace("a"), Namespace(None, "a"), Namespace("a", "b"), Namespace("ab"), Namespace(None, "ab")]
    spaces += [Namespace("", None), Namespace(None, ""), Namespace("", "")]
    roots = [root_hash(space) for space in spaces]
    assert len(set(roots)) == len(roots)
    assert root_hash(PLAIN) == 0


def test_extras_separate_equal_tokens_from_their_block_on() -> None:
    packed = pack_tokens(range(6))
    plain = chain_hashes(packed, 2, 0)
    image = chain_hashes(packed, 2, 0, (b"", b"image-1", b""))
    assert image[0] == plain[0]
    assert not set(image[1:]) & set(plain[1:])


@pytest.mark.parametrize(("bad", "error"), [([-1], OverflowError), ([2**32], OverflowError), (["a"], TypeError)])
def test_what_is_no_token_id(bad: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        pack_tokens(bad)
