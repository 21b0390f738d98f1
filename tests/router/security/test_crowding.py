"""Clients choose what hashes their prompts' blocks have, and cannot know where a router keeps these."""

from __future__ import annotations

from indexer.kernels import NO_SECRET
from indexer.types import WorkerRank
from publishers.local_plane import LocalPlane
from publishers.rank import Epochs, RankPublisher
from router.app import App
from router.settings import Settings


async def test_each_router_has_a_secret_of_its_own_for_all_that_it_keeps_of_prompts() -> None:
    found: list[int] = []
    for _ in range(2):
        app = App(Settings())
        indexer = app._indexer
        indexes = [indexer.index, indexer._guesses, indexer._predicted._younger, indexer._predicted._older]
        assumptions = [indexer._assumed._lives, indexer._guessed._lives]
        secrets = {index._secret for index in indexes} | {int(lives._nodes[0, 0]) for lives in assumptions}
        secrets.add(app._metrics.lifecycle._secret)
        assert len(secrets) == 1
        found += secrets
    assert len({*found, NO_SECRET}) == 3


def test_so_has_each_publisher_of_a_rank() -> None:
    relays = [RankPublisher(WorkerRank("w", 0), LocalPlane(), "ns", Epochs(lambda: 1)).relay for _ in range(2)]
    secrets = [relay._handles._secret for relay in relays]
    assert len({*secrets, NO_SECRET}) == 3
    for relay, secret in zip(relays, secrets, strict=True):
        for _ in range(2):
            relay._windows.welcome(0, 4)
            assert relay._windows._groups[0].blocks._secret == secret
            relay.restart(relay.epoch + 1)
