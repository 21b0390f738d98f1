"""Keeps the hottest prefixes in the shared store, and has workers that join load them.

A read lease keeps the master from evicting an object. Look-ups take none; here they are taken on purpose, for no more
objects than the operator allows, since other objects lack the room that these take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import compress, islice
from typing import Any, Final

import aiohttp

from indexer.kv_indexer import KVIndexer, PromptHashes
from publishers.dialogue import read_whole
from publishers.logs import log_event
from publishers.reasons import reason_of
from router.store.hot_prefixes import CAPACITY
from router.store.hot_prompts import HotPrompt
from router.store.master import Unanswered
from router.store.shared_store import SharedStore
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

INTERVAL: Final = 2.5
"""Seconds between two renewals: half of Mooncake's default lease (`default_kv_lease_ttl`)."""
MOST: Final = 64
"""Prefixes of each model that are looked at."""
AT_ONCE: Final = 4
"""Leases that are asked for at a time. One after the other, thousands would take longer than a lease lasts."""
WARM_LIMIT: Final = 10.0
"""Seconds after which a worker that joins serves, warm or not."""


class StoreKeeper:
    def __init__(self, store: SharedStore, budget: int) -> None:
        """`budget`: objects that are kept alive at a time."""
        self._store = store
        self._budget = budget

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self.renew()
            except Unanswered as error:
                log_event(logger, logging.DEBUG, "The store's leases could not be renewed", reason=error)
            except Exception:  # else none would ever be renewed again
                logger.exception("The store's leases could not be renewed")

    async def renew(self) -> int:
        """One round, the hottest first; returns how many objects have a lease now. What prefixes share counts once."""
        leased: set[str] = set()
        blocks: set[int] = set()
        for _, lookup, prompt in self._store.hottest_prompts(MOST):
            chain = blocks.union(prompt.chain.tolist())
            fits = len(chain) <= self._budget  # each block has an object at least
            keys = await lookup.keys_there(prompt) if fits else None
            new = [key for key in keys or () if key not in leased]
            if new and len(leased) + len(new) <= self._budget:
                leased |= await self._lease(new)
                blocks = chain
        return len(leased)

    async def _lease(self, keys: Sequence[str]) -> set[str]:
        """Take leases on the objects of `keys`; returns the keys whose objects are there."""
        there: set[str] = set()
        for at in range(0, len(keys), AT_ONCE):
            part = keys[at : at + AT_ONCE]
            there.update(compress(part, await asyncio.gather(*map(self._store.master.lease, part))))
        return there


async def handed_over(worker: Worker, store: SharedStore, indexer: KVIndexer) -> bool:
    """Whether the store has the hottest prefixes that a worker holds, so that it may leave; also where nothing can be
    known, and of a worker that does not use the store."""
    for _, lookup, prompt in store.hottest_prompts(MOST) if worker.uses_store else ():
        if not store.master.healthy:
            return True
        last = PromptHashes(lookup.block_size, {lookup.block_size: prompt.chain[-1:]})
        held = any(rank.worker_id == worker.id for rank in indexer.find_matches(last))
        if held and lookup.keys_of_prompt(prompt) and await lookup.keys_there(prompt) is None:
            return False
    return True


async def warm(session: aiohttp.ClientSession, worker: Worker, store: SharedStore, number: int) -> None:
    """Have a worker that joins take the hottest prefixes of its models and adapters in before it serves, `number` at
    most."""
    names = {(model.parent or model.id, model.adapter): model.id for model in worker.models}
    hottest = store.hottest_prompts(CAPACITY)  # all there are: any number may be for adapters that others have
    named = ((names.get((model, prompt.namespace.lora_name)), prompt) for model, _, prompt in hottest)
    wanted = list(islice((_request(name, prompt) for name, prompt in named if name), number))
    if not wanted or worker.role == "decode" or not worker.spec.store:
        return
    taken, trouble = await _ask_all(session, worker.spec.url + "/v1/completions", wanted)
    if trouble:
        message = "A worker joins half warm"
        log_event(logger, logging.WARNING, message, worker=worker.id, prefixes=taken, reason=trouble)
    else:
        log_event(logger, logging.INFO, "Warmed", worker=worker.id, prefixes=taken)


async def _ask_all(session: aiohttp.ClientSession, url: str, bodies: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """How many were answered, and why the others were not; "" if all were."""
    answered, trouble = 0, ""
    try:
        async with asyncio.timeout(WARM_LIMIT):
            for body in bodies:
                async with session.post(url, json=body) as answer:
                    await read_whole(answer)
                if answer.status == 200:
                    answered += 1
                else:
                    trouble = f"it answered {answer.status}"
    except (aiohttp.ClientError, TimeoutError) as error:
        trouble = reason_of(error)
    return answered, trouble


def _request(model: str, prompt: HotPrompt) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt.tokens.tolist(), "max_tokens": 1}
    salt = prompt.namespace.cache_salt
    return body | ({"cache_salt": salt} if salt else {})
