"""The store that the workers share, as routing sees it: the names of each model's blocks there, and look-ups."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

import aiohttp
import numpy as np
from msgspec.structs import replace
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.description import Model, bases
from engines.store import (
    Layout,
    SglangLayout,
    Verdict,
    VllmGroup,
    VllmLayout,
    names_model,
    of_language_model,
    seed_of,
)
from indexer.hashing import chain_hashes, root_hash
from indexer.types import PLAIN
from publishers.logs import log_event
from router.context import Prompt
from router.metrics.tallies import Histogram, counter_family, histogram_family
from router.model_config import read_config
from router.store.hot_prefixes import HotPrefix
from router.store.hot_prompts import HotPrompt, HotPrompts
from router.store.lookup import LOOKUP_BOUNDS, OUTCOMES, Outcome, StoreLookup
from router.store.master import StoreMaster
from router.store.spec import StoreSpec
from router.workers.fleet import Fleet
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

AGAIN: Final = 10.0
LONGEST: Final = 600.0
"""Seconds until names are compared again that could not be or did not agree, the first time and at most. In between
each time takes twice as long as the last, because a master lists all its keys for that."""
_UNLIKE: Final = "A worker's blocks in the store are not named as those that are looked up: none are counted on there"


class SharedStore(Collector):
    def __init__(
        self,
        spec: StoreSpec,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        folders: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`folders`: `--model-folder`."""
        self._spec = spec
        self._fleet = fleet
        self.master = StoreMaster(spec.url, session, tls)
        self._clock = clock
        self._folders = folders
        self._seconds = Histogram(LOOKUP_BOUNDS)
        self._counts: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        """Of all models together, whatever becomes of a model's look-up."""
        self._learning = asyncio.Lock()
        self._lookups: dict[str, StoreLookup | None] = {}
        """By base model; None where the names of its blocks cannot be known."""
        self._layouts: dict[str, Layout | None] = {}
        """By base model, the layout that its look-up uses."""
        self._hot: dict[str, HotPrompts] = {}
        self.problems: dict[str, str] = {}
        """By base model, a sentence for people."""

    async def leading_tokens(self, prompt: Prompt, model: str | None) -> int:
        """How many of the prompt's leading tokens the store has; 0 if that cannot be found out."""
        base = self._fleet.base_model(model)
        lookup = self._lookups.get(base.id) if base else None
        if base is None or lookup is None or prompt.hashes is None or prompt.ids is None:
            return 0
        chain = prompt.hashes.chains.get(lookup.block_size)
        if chain is None:  # no worker's own blocks are of that size
            chain = chain_hashes(prompt.ids, lookup.block_size, root_hash(prompt.namespace))
        try:
            self._tell_adapter(lookup, model)
            self._hot[base.id].ask(prompt.ids, chain, prompt.namespace, self._clock())
            return await lookup.lookup(prompt.ids, chain, prompt.namespace)
        except Exception:  # whatever it is, workers serve the request without the store
            logger.exception("A prompt could not be looked up in the store")
            return 0

    def _tell_adapter(self, lookup: StoreLookup, model: str | None) -> None:
        """Engines load adapters while they run, and hash their paths into blocks."""
        _, found = self._fleet.models().get(model or "", (None, None))
        if found and found.adapter and found.root:
            lookup.adapt(found.adapter, found.root)

    def hottest(self, number: int, now: float) -> Iterator[tuple[str, StoreLookup, list[HotPrefix]]]:
        """For each base model that can be looked up: its name, its look-up and its hottest prefixes."""
        for model, lookup in self._lookups.items():
            if lookup:
                yield model, lookup, self._hot[model].hottest(number, now)

    def hottest_prompts(self, number: int) -> list[tuple[str, StoreLookup, HotPrompt]]:
        """The hottest prefixes whose tokens are kept, of all models in one order; at most `number` of each model."""
        now = self._clock()
        found = [
            (heat, model, lookup, prompt)
            for model, lookup in self._lookups.items()
            if lookup
            for heat, prompt in self._hot[model].prompts(number, now)
        ]
        found.sort(key=lambda each: -each[0])
        return [(model, lookup, prompt) for _, model, lookup, prompt in found]

    async def learn(self, worker: Worker) -> None:
        """A worker has described itself: find out the names of its models' blocks, unless the known names are still
        right because other workers use them; and whether they are this worker's too."""
        for model in bases(worker.models) if worker.spec.store else ():
            async with self._learning:  # workers come at once: the master lists its keys for the first only
                layout = self._layout_of(worker, model)
                if model.id not in self._lookups or self._is_new(layout, worker, model):
                    await self._follow(layout, model)
                    self._compare_workers(self._fleet.workers.values())
        async with self._learning:
            self._forget_models((worker, *self._fleet.workers.values()))
        self._compare_workers([worker])
        if worker.spec.store and not worker.names_alike:
            log_event(logger, logging.WARNING, _UNLIKE, worker=worker.id)

    def _forget_models(self, workers: Collection[Worker]) -> None:
        """Those that none of `workers` has, as after an upgrade to a model of another name. Not before others come: who
        leaves may well be replaced by another with the same model, which is then warmed."""
        for name in [name for name in self._lookups if not any(name in worker.model_names for worker in workers)]:
            del self._lookups[name], self._layouts[name]
            self._hot.pop(name, None)
            self.problems.pop(name, None)

    def _compare_workers(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            worker.names_alike = all(self._is_alike(worker, model) for model in bases(worker.models))

    def _is_alike(self, worker: Worker, model: Model) -> bool:
        """Whether the worker names the model's blocks as look-ups do; true where nothing is looked up."""
        known, layout = self._layouts.get(model.id), self._layout_of(worker, model)
        return known is None or (layout is not None and _example(layout) == _example(known))

    async def _follow(self, layout: Layout | None, model: Model) -> None:
        before, found = self._lookups.get(model.id), await self._make(layout, model)
        if found and not (before and before.block_size == found.block_size):
            self._hot[model.id] = HotPrompts(found.block_size)
        self._lookups[model.id], self._layouts[model.id] = found, layout

    def _is_new(self, layout: Layout | None, worker: Worker, model: Model) -> bool:
        known = self._layouts[model.id]
        if layout is None or layout == known:
            return False
        if known is None or self._lookups[model.id] is None:
            return True
        return known not in (
            self._layout_of(one, own)
            for one in self._fleet.up
            for own in one.models
            if own.id == model.id and one is not worker and one.spec.store
        )

    def _layout_of(self, worker: Worker, model: Model) -> Layout | None:
        """How the worker names the blocks of the model itself. Of adapters the look-up learns when they are asked
        for."""
        layout = layout_of(worker, model, self._spec, self._folders)
        return layout and replace(layout, loras={})

    def tick(self, _: float) -> None:
        """To be called every second or so."""
        self.master.close_expired()

    async def run(self) -> None:
        """Until cancelled: a store is empty at first, and may get keys of other names, or the right ones, later."""
        pause = AGAIN
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST)
            try:
                await self.compare()
            except Exception:  # else names would never be compared again
                logger.exception("The names of the store's keys could not be compared")

    async def compare(self) -> None:
        """Compare the names again of those models of which neither a comparison nor a look-up has shown that they
        agree."""
        for name, lookup in list(self._lookups.items()):
            async with self._learning:
                if lookup and not lookup.agrees and lookup is self._lookups.get(name):
                    self._judge(name, await lookup.check())

    async def _make(self, layout: Layout | None, model: Model) -> StoreLookup | None:
        spec = self._spec
        self.problems.pop(model.id, None)
        if layout is None or layout.problem:
            why = layout.problem if layout and layout.problem else "its engine is none whose keys are known"
            self._say(model.id, why)
            return None
        lookup = StoreLookup(self.master, spec.budget_ms / 1000, layout, self._clock, self._seconds, self._counts)
        verdict = await lookup.check()
        self._judge(model.id, verdict)
        log_event(
            logger, logging.INFO, "Looking up blocks in the store", model=model.id, store=spec.url, keys=verdict.why
        )
        return lookup

    def _judge(self, name: str, verdict: Verdict) -> None:
        if verdict.agrees is False:
            self._say(name, verdict.why)
        elif verdict.agrees and self.problems.pop(name, None):
            log_event(logger, logging.INFO, "The store helps this model after all", model=name, reason=verdict.why)

    def _say(self, name: str, problem: str) -> None:
        if self.problems.get(name) != problem:
            log_event(logger, logging.ERROR, "The store may not help this model", model=name, reason=problem)
        self.problems[name] = problem

    @property
    def healthy(self) -> bool:
        return any(self._lookups.values()) and self.master.healthy

    # -- prometheus_client's Collector

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("router_store_up", "1 while the store's master answers.", float(self.healthy))
        counts = [((outcome,), count) for outcome, count in self._counts.items()]
        yield counter_family("router_store_lookups", "Prompts looked up, by outcome.", ("outcome",), counts)
        seconds = "Naming a prompt's blocks and asking for them."
        yield histogram_family("router_store_lookup_seconds", seconds, (), [((), self._seconds)])

    async def close(self) -> None:
        for lookup in self._lookups.values():
            if lookup:
                await lookup.close()
        self.master.close()


def _example(layout: Layout) -> tuple[str, ...]:
    """How the layout names some block, to compare two layouts by; () where that cannot be known."""
    digests = layout.hashes(np.arange(layout.block_size, dtype=np.uint32), PLAIN)
    return layout.keys(digests[0]) if digests else ()


def layout_of(worker: Worker, model: Model, spec: StoreSpec, folders: Sequence[str] = ()) -> Layout | None:
    """From the settings, else from what the engine and the model's config.json say. None: the engine's kind is
    unknown."""
    version = worker.description.version if worker.description else None
    size, name = spec.block_size or worker.block_size, spec.model or model.root or model.id
    config = of_language_model(read_config(model.root, folders))
    latent = config.get("kv_lora_rank") is not None  # null: a family that has MLA, and a model that does not use it
    tp, pp = spec.tp or 1, spec.pp
    heads = config.get("num_key_value_heads")
    loras = {each.adapter: each.root for each in worker.models if each.adapter and each.root}
    if worker.engine == "sglang":
        served = spec.model or model.id
        named = names_model(version)
        return SglangLayout(model=served, names_model=named, block_size=size, tp=tp, pp=pp, mla=latent, loras=loras)
    if worker.engine != "vllm":
        return None
    return VllmLayout(
        model=name,
        block_size=size,
        hash=spec.hash,
        hash_seed=spec.hash_seed or seed_of(version),
        tp=tp,
        pp=pp,
        kv_heads=heads if isinstance(heads, int) else None,
        groups=(VllmGroup(holds="latent" if latent else "heads"),),
        loras=loras,
    )
