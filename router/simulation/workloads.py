"""Named synthetic workloads to judge routing policies by (pure).

They were chosen without regard to any policy's result, and committed before one was tuned on them. Changing one means
judging every policy again.

**Where numbers come from.** None is fitted to a trace. Each is a round number of the order that people report for such
traffic; where it is a common default, the workload says so. What matters is that workloads differ in what decides
routing: how much is shared and by whom, how long requests stay, how even arrivals and workers are.

**Rates** aim at half of the fleet's capacity. By `engines/sim/timing.py` a request costs its worker, in seconds,

    new / 25,000 + new × (prompt − new / 2) × 1.05e-9 + answer × (0.006 / batch + 0.0001 + 4.9e-8 × context)

where `new` are the prompt tokens that one unbounded cache for the whole fleet would not hold, and `batch` is as many
requests of the mean size as fit the cache, at most 256. That is a rough estimate: real caches and routers find less, so
where what is live exceeds the caches the knee lies well below twice the nominal rate (`small-caches` is set lower for
this); and running requests that share a prefix share its memory, so more of them fit than counted. The tests hold the
rates to the estimate.

**Start.** All is cold and no session is under way, so a rate climbs for about as long as sessions last (one to three
minutes). A window onto running traffic would instead begin with every context uncached, a storm of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from router.ab.trace import Row
from router.simulation.traffic import (
    SECONDS_PER_TOKEN,
    Common,
    Drawn,
    Prompt,
    Sessions,
    Shape,
    Source,
    Zipf,
    bursts,
    milliseconds,
    poisson,
)

CACHE_TOKENS = 262_144
"""What an 80 GB accelerator holds beside an 8B model: the simulated engine's default."""


class Workload(NamedTuple):
    """Traffic, and the fleet that it is meant for."""

    name: str
    about: str
    workers: int
    cache_tokens: int
    """Per worker."""
    slow: Mapping[int, float]
    """Worker index -> factor that its steps take longer; others take 1."""
    rows: Callable[[int, float], list[Row]]
    """(seed, duration in seconds) -> the trace at the nominal rate, in order of arrival."""
    seconds: float = 600.0
    """A sensible duration: larger fleets run for less, or there would be a million requests."""
    max_loras: int | None = None
    """LoRA adapters that a worker runs at once; None: there are none."""


Traffic = Callable[[Source, float], Iterator[Row]]


def _rows(traffic: Traffic, seed: int, duration: float) -> list[Row]:
    return sorted(traffic(Source(seed), duration), key=lambda row: row.timestamp)


def _mix(*parts: Traffic) -> Traffic:
    return lambda source, duration: chain.from_iterable(part(source, duration) for part in parts)


CHAT = Shape(
    opening=Drawn(150, 1.2, 10, 16_000),
    turn=Drawn(60, 1.0, 5, 4_000),
    answer=Drawn(220, 0.8, 10, 2_000),
    turns=Drawn(3, 0.6, 1, 12),
    pause=Drawn(12, 0.8, 2, 120),
)
"""People ask briefly, sometimes paste much, and get some hundred tokens; most conversations are a few turns long."""
SYSTEM = Common(1, (1, 1))
"""One system prompt of 512 tokens."""

AGENT = Shape(
    opening=Drawn(600, 1.0, 50, 8_000),
    turn=Drawn(350, 1.2, 20, 8_000),
    answer=Drawn(80, 0.8, 10, 1_000),
    turns=Drawn(16, 0.7, 2, 80),
    pause=Drawn(1.0, 0.8, 0.1, 20),
)
"""A tool call is short, its result anything from a line to a file, and the next step follows when the tool is done."""
APPLICATIONS = Common(12, (8, 24), skew=1.0)
"""Instructions and tool definitions of 4k to 12k tokens."""

DOCUMENT = Shape(
    opening=Drawn(33_000, 0.35, 20_000, 60_000),
    turn=Drawn(40, 0.6, 10, 200),
    answer=Drawn(180, 0.7, 20, 1_000),
    turns=Drawn(5, 0.4, 2, 12),
    pause=Drawn(8, 0.6, 2, 60),
)
FEW_SHOT = Shape(opening=Drawn(200, 0.7, 10, 1_000), answer=Drawn(24, 0.6, 8, 64))
TEMPLATES = Common(40, (4, 8), skew=1.0)
CROWDED = Shape(
    opening=Drawn(1_500, 1.0, 50, 12_000),
    turn=Drawn(150, 1.0, 5, 4_000),
    answer=Drawn(250, 0.7, 10, 2_000),
    turns=Drawn(5, 0.5, 1, 15),
    pause=Drawn(18, 0.7, 2, 120),
    limit=58_000,
)
PROJECT = Shape(
    opening=Drawn(12_000, 0.8, 500, 60_000),
    turn=Drawn(300, 1.2, 10, 8_000),
    answer=Drawn(400, 0.8, 10, 3_000),
    turns=Drawn(10, 0.5, 2, 40),
    pause=Drawn(10, 0.7, 2, 120),
)
# The large mixes' sessions are shorter, so that they are in full swing well before a run of `seconds` is over.
SHORT_CHAT = CHAT._replace(turns=Drawn(2, 0.6, 1, 6), pause=Drawn(5, 0.6, 1, 20))
SHORT_AGENT = AGENT._replace(turns=Drawn(8, 0.5, 2, 20))


class Corpus:
    """Chunks of a block or two, drawn by popularity and put one behind another."""

    def __init__(self, source: Source, chunks: int, skew: float) -> None:
        self._source = source
        self._popularity = Zipf(chunks, skew)
        self._sizes = [source.rng.randint(1, 2) for _ in range(chunks)]
        # The same chunk after other chunks is other content to a prefix cache: ids belong to the way to a chunk.
        self._ways: dict[tuple[int, int], list[int]] = {}

    def follow(self, blocks: list[int], number: int) -> list[int]:
        """The blocks, and behind them those of `number` different chunks."""
        chosen: dict[int, None] = {}
        while len(chosen) < number:
            chosen[self._popularity.draw(self._source)] = None
        for chunk in chosen:
            way = (blocks[-1], chunk)
            if way not in self._ways:
                self._ways[way] = self._source.fresh(self._sizes[chunk])
            blocks = blocks + self._ways[way]
        return blocks


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A system prompt, retrieved chunks in the order of their relevance, and a question."""

    rate: float
    question: Drawn
    answer: Drawn
    system: int = 2
    """Blocks."""
    chunks: tuple[int, int] = (3, 8)
    corpus: int = 20_000
    skew: float = 0.9

    def __call__(self, source: Source, duration: float) -> Iterator[Row]:
        system, corpus = source.fresh(self.system), Corpus(source, self.corpus, self.skew)
        for at in poisson(source, self.rate, duration):
            prompt = Prompt(corpus.follow(system, source.rng.randint(*self.chunks)))
            prompt.grow(source, self.question.whole(source))
            yield Row(milliseconds(at), prompt.length, self.answer.whole(source), prompt.hash_ids(source))


@dataclass(frozen=True, slots=True)
class Search:
    """Tree searches: at every depth each kept node is sampled `samples` times at once, then the best are extended."""

    rate: float
    task: Drawn
    step: Drawn
    """Tokens of one sample, which is what a node grows by."""
    scoring: Drawn
    """Seconds from the last sample of a level to the next level."""
    instructions: Common
    depth: tuple[int, int] = (3, 8)
    kept: int = 3
    samples: int = 8

    def __call__(self, source: Source, duration: float) -> Iterator[Row]:
        text = self.instructions.drawing(source)
        for start in poisson(source, self.rate, duration):
            root = Prompt(text())
            root.grow(source, self.task.whole(source))
            rows = self._descend(source, root, start)
            yield from (row for row in rows if row.timestamp < duration * 1000)

    def _descend(self, source: Source, root: Prompt, at: float) -> Iterator[Row]:
        nodes = [root]
        for _ in range(source.rng.randint(*self.depth)):
            children: list[tuple[Prompt, int]] = []
            for node in nodes:
                ids, steps = node.hash_ids(source), [self.step.whole(source) for _ in range(self.samples)]
                yield from (Row(milliseconds(at), node.length, step, ids) for step in steps)
                children += [(node, step) for step in steps]
            at += max(step for _, step in children) * SECONDS_PER_TOKEN + self.scoring.draw(source)
            nodes = [_extended(source, *child) for child in source.rng.sample(children, self.kept)]


def _extended(source: Source, node: Prompt, tokens: int) -> Prompt:
    child = node.branch()
    child.grow(source, tokens)
    return child


def _workload(
    name: str,
    about: str,
    traffic: Traffic,
    workers: int = 8,
    cache_tokens: int = CACHE_TOKENS,
    slow: Mapping[int, float] | None = None,
    seconds: float = 600.0,
    max_loras: int | None = None,
) -> Workload:
    return Workload(name, about, workers, cache_tokens, slow or {}, partial(_rows, traffic), seconds, max_loras)


_ALL = (
    _workload(
        "chat",
        "People talk to an assistant with a 512-token system prompt: about 4 turns, short questions with a long tail"
        " of pasted text, answers around 300 tokens, pauses around 16 s.",
        Sessions(13.0, CHAT, SYSTEM),
    ),
    _workload(
        "long-documents",
        "Readers ask around 5 questions about a document of 20k to 60k tokens, a report or a contract: a wrong worker"
        " costs seconds of prefill, and few contexts fit a cache at once.",
        Sessions(0.7, DOCUMENT, SYSTEM),
    ),
    _workload(
        "agents",
        "A dozen applications of Zipf popularity with 4k to 12k tokens of instructions and tool definitions, the size"
        " that coding agents are known for, take around 20 quick steps with tool results of mixed length.",
        Sessions(0.85, AGENT, APPLICATIONS),
    ),
    _workload(
        "hot-prompt",
        "One product whose 6,144-token instructions open every request, and nothing else is shared: after the first"
        " request every worker has the prefix, so that only load is left to decide by.",
        Sessions(26.0, Shape(Drawn(400, 1.0, 20, 8_000), Drawn(150, 0.8, 10, 1_000)), Common(1, (12, 12))),
    ),
    _workload(
        "no-reuse",
        "Unrelated single requests from 32 to 32k tokens, as on a gateway for many tenants: the control, where a"
        " cache can do nothing and a policy must not lose to spreading by load.",
        Sessions(17.5, Shape(Drawn(1_500, 1.2, 32, 32_000), Drawn(200, 0.9, 10, 2_000))),
    ),
    _workload(
        "bursts",
        "Chat of one or two turns whose conversations begin in bursts, five times the mean rate for about 6 s in a"
        " minute, as when a page goes live or a job starts: mean load is half, load in a burst is above capacity.",
        Sessions(30.0, CHAT._replace(turns=Drawn(1.5, 0.5, 1, 4)), SYSTEM, bursts),
    ),
    _workload(
        "mixed-hardware",
        "The chat workload on 8 workers of which 3 are of an older generation and take twice as long for every step, as"
        " one generation of accelerators often does to the next.",
        Sessions(10.5, CHAT, SYSTEM),
        slow={1: 2.0, 4: 2.0, 6: 2.0},
    ),
    _workload(
        "batch-few-shot",
        "Classification and extraction jobs: 40 templates of 2k to 4k tokens with examples, of Zipf popularity, a"
        " short item each and answers of 8 to 64 tokens.",
        Sessions(200.0, FEW_SHOT, TEMPLATES),
    ),
    _workload(
        "large-fleet",
        "Chat and agents together on 64 workers, half of the work each: whether a policy still spreads evenly, and"
        " stays fast, with many to choose from.",
        _mix(Sessions(52.0, CHAT, SYSTEM), Sessions(3.0, AGENT, APPLICATIONS)),
        workers=64,
        seconds=300.0,
    ),
    _workload(
        "huge-fleet",
        "The same mix with shorter sessions on 512 workers: the cost of a choice, and herds that all go to the least"
        " loaded.",
        _mix(Sessions(800.0, SHORT_CHAT, SYSTEM), Sessions(65.0, SHORT_AGENT, APPLICATIONS)),
        workers=512,
        seconds=60.0,
    ),
    _workload(
        "small-caches",
        "Conversations of some thousand tokens on workers with 65,536 tokens of cache, as beside a large model on one"
        " accelerator: what is live exceeds the caches, so that every copy of a context drives out another.",
        Sessions(1.9, CROWDED, SYSTEM),
        cache_tokens=65_536,
    ),
    _workload(
        "big-caches",
        "Long conversations over pasted files on workers with 1,048,576 tokens, as with a quantised cache or a second"
        " tier in host memory: what was once computed stays, if requests come back to it.",
        Sessions(0.44, PROJECT, SYSTEM),
        cache_tokens=1_048_576,
    ),
    _workload(
        "tree-search",
        "Reasoning by search: 8 samples at once from each of up to 3 nodes, then the best are extended, 3 to 8 levels"
        " deep: identical prompts at the same instant, before any of them is in a cache.",
        Search(
            0.28,
            task=Drawn(3_000, 0.6, 500, 12_000),
            step=Drawn(200, 0.6, 20, 1_000),
            scoring=Drawn(1.0, 0.5, 0.2, 5),
            instructions=Common(1, (2, 2)),
        ),
    ),
    _workload(
        "rag",
        "Questions over retrieved text: 1,024 tokens of instructions, then 3 to 8 chunks of 512 or 1,024 tokens,"
        " which are common default sizes, drawn by Zipf from 20,000 in varying order, so that prefixes part after a"
        " chunk or two.",
        Retrieval(14.0, question=Drawn(60, 0.7, 10, 400), answer=Drawn(180, 0.7, 20, 1_000)),
    ),
    _workload(
        "long-answers",
        "Reasoning models: short questions after a 512-token system prompt and answers of 1k to 6k tokens: nearly all"
        " work is decoding, and a choice binds a worker for a minute.",
        Sessions(4.5, Shape(Drawn(200, 0.8, 20, 2_000), Drawn(2_500, 0.5, 1_000, 6_000)), SYSTEM),
    ),
    _workload(
        "adapters",
        "The chat workload for 24 LoRA adapters of Zipf popularity, of which each worker runs 4 at once: requests for a"
        " fifth wait there until one of the 4 has nothing more to do.",
        Sessions(13.0, CHAT, SYSTEM, adapters=24),
        max_loras=4,
    ),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
