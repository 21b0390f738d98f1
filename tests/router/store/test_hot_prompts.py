"""What hot prefixes are made of, within a bound."""

from __future__ import annotations

from indexer.hashing import Tokens, chain_hashes, pack_tokens, root_hash
from indexer.types import Namespace
from router.store.hot_prompts import HotPrompt, HotPrompts

SIZE = 4
PLAIN = Namespace()


def prompt(*blocks: int) -> Tokens:
    return pack_tokens([block for block in blocks for _ in range(SIZE)])


def ask(hot: HotPrompts, tokens: Tokens, namespace: Namespace = PLAIN, times: int = 1) -> None:
    for _ in range(times):
        hot.ask(tokens, chain_hashes(tokens, SIZE, root_hash(namespace)), namespace, 0.0)


def hottest(hot: HotPrompts, number: int) -> list[HotPrompt]:
    return [found for _, found in hot.prompts(number, 0.0)]


def test_the_hottest_prefix_comes_with_its_tokens() -> None:
    hot = HotPrompts(SIZE)
    for number in range(20):
        ask(hot, prompt(1, 2, 3, 4, 100 + number))
    [found] = hottest(hot, 5)
    assert found.tokens.tolist() == prompt(1, 2, 3, 4).tolist()
    assert found.chain.tolist() == chain_hashes(found.tokens, SIZE, root_hash(PLAIN)).tolist()
    assert found.namespace == PLAIN


def test_namespaces_are_apart() -> None:
    hot, salted = HotPrompts(SIZE), Namespace(cache_salt="a")
    ask(hot, prompt(1, 2), times=9)
    ask(hot, prompt(1, 2), salted, times=5)
    assert [found.namespace for found in hottest(hot, 5)] == [PLAIN, salted]


def test_what_was_asked_once_is_not_kept() -> None:
    hot = HotPrompts(SIZE)
    for number in range(50):
        ask(hot, prompt(number, number + 1))
    assert hottest(hot, 50) == []
    assert not hot._kept


def test_no_more_tokens_are_kept_than_there_is_room_for() -> None:
    hot = HotPrompts(SIZE, most_tokens=10 * SIZE)
    for number in range(50):
        ask(hot, prompt(number), times=3)
    kept = hottest(hot, 99)
    assert sorted(found.tokens[0] for found in kept) == list(range(40, 50))
    assert hot._room == 0
    ask(hot, prompt(40), times=2)
    ask(hot, prompt(60), times=3)
    assert sorted(found.tokens[0] for found in hottest(hot, 99)) == [40, *range(42, 50), 60]
