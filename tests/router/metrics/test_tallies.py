"""Our numbers are shown as prometheus_client's own metrics would show the same observations."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from collections import Counter as Counts
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.parser import text_string_to_metric_families

from engines.disaggregation.answer import Prefilled
from router.metrics.exposition import PIECE
from router.metrics.registry import Metrics, merge
from router.metrics.tallies import _COUNTERS, _DECISION_SECONDS, _PARTS, _SECONDS, Histogram, Tallies
from router.proxy.legs import Parted
from router.proxy.outcome import End, Outcome
from tests.fakes.waiting import other_work

Families = dict[str, tuple[str, str, dict[tuple[str, frozenset[tuple[str, str]]], float]]]
"""By name: type, text, and each sample by its name and labels."""


ELSEWHERE = ("router_queue_", "router_client", "router_buffered_")
"""Those that are tested with what they tell of: tests/router/proxy/test_proxy_overload.py."""


def exposed(registry: CollectorRegistry) -> Families:
    """What a reader of the page finds, but for times of creation."""
    return {
        family.name: (
            family.type,
            family.documentation,
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for sample in family.samples
                if not sample.name.endswith("_created")
            },
        )
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        if not family.name.endswith("_created")
    }


class Theirs:
    """The same metrics, kept by prometheus_client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "router_requests",
            "Requests by worker, status and how they ended.",
            ["worker", "status", "end"],
            registry=self.registry,
        )
        self.counters = {
            figure: Counter(name, text, ["worker"], registry=self.registry) for name, text, figure in _COUNTERS
        }
        self.first_byte = TheirHistogram(
            "router_first_byte_seconds",
            "From a request read to the first byte of its answer, errors left out (streamed: TTFT).",
            ["worker"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = TheirHistogram(
            "router_request_seconds",
            "From a request read to the end of its answer.",
            ["worker"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.decision = TheirHistogram(
            "router_decision_seconds",
            "Matching, choosing and booking for one request.",
            buckets=_DECISION_SECONDS,
            registry=self.registry,
        )
        self.regret = Counter(
            "router_overlap_regret_tokens",
            "Cached tokens given up: best overlap anywhere less the chosen one.",
            registry=self.registry,
        )
        self.stored = Counter(
            "router_predicted_store_tokens",
            "Prompt tokens expected to be loaded from the shared store.",
            registry=self.registry,
        )
        self.refused = Counter(
            "router_refused",
            "Requests refused because they were predicted to miss an objective.",
            ["objective"],
            registry=self.registry,
        )
        for objective in ("ttft", "tbt"):
            self.refused.labels(objective)
        self.parted = Counter("router_pd_requests", "Requests served in two parts.", registry=self.registry)
        self.leg_failures = Counter(
            "router_pd_leg_failures",
            "Parts that a worker failed, retried or not.",
            ["leg"],
            registry=self.registry,
        )
        for leg in ("prefill", "decode"):
            self.leg_failures.labels(leg)
        self.parts = {
            name: TheirHistogram(f"router_pd_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)
            for name, text in _PARTS.items()
        }
        self.in_flight = Gauge("router_requests_in_flight", "Requests being served.", registry=self.registry)

    def know(self, worker: str) -> None:
        """A worker of whom anything was counted is shown with all its counts."""
        for metric in (*self.counters.values(), self.first_byte, self.duration):
            metric.labels(worker)


class Both:
    def __init__(self) -> None:
        self.ours, self.theirs = Tallies(), Theirs()
        self.registry = CollectorRegistry()
        self.registry.register(self.ours)

    def end(self, worker: str, status: int, end: str) -> None:
        self.ours.worker(worker).ends[status, end] += 1
        self.theirs.know(worker)
        self.theirs.requests.labels(worker, status, end).inc()

    def count(self, worker: str, figure: str, by: int) -> None:
        tally = self.ours.worker(worker)
        setattr(tally, figure, getattr(tally, figure) + by)
        self.theirs.know(worker)
        self.theirs.counters[figure].labels(worker).inc(by)

    def time(self, worker: str, what: str, seconds: float) -> None:
        getattr(self.ours.worker(worker), what).observe(seconds)
        self.theirs.know(worker)
        getattr(self.theirs, what).labels(worker).observe(seconds)

    def decide(self, seconds: float, regret: int, stored: int) -> None:
        self.ours.stored_tokens += stored
        self.theirs.stored.inc(stored)
        self.ours.decision.observe(seconds)
        self.ours.regret_tokens += regret
        self.theirs.decision.observe(seconds)
        self.theirs.regret.inc(regret)

    def refuse(self, objective: str) -> None:
        self.ours.refused[objective] += 1
        self.theirs.refused.labels(objective).inc()

    def part(self, prefill: float, transfer: float | None, decode: float) -> None:
        parted = Parted("p", prefill, transfer, Prefilled())
        self.ours.parted.prefilled(parted)
        self.ours.parted.decoded(parted, decode)
        self.theirs.parted.inc()
        self.theirs.parts["prefill"].observe(prefill)
        if transfer is not None:
            self.theirs.parts["transfer"].observe(transfer)
        self.theirs.parts["decode"].observe(decode)

    def fail(self, leg: str) -> None:
        self.ours.parted.failures[leg] += 1
        self.theirs.leg_failures.labels(leg).inc()

    def in_flight(self, by: int) -> None:
        self.ours.in_flight += by
        self.theirs.in_flight.inc(by)

    def check(self) -> None:
        ours = exposed(self.registry)
        assert {name: found for name, found in ours.items() if not name.startswith(ELSEWHERE)} == exposed(
            self.theirs.registry
        )


workers = st.sampled_from(["", "a", "b:8000", 'quo"ted', "new\nline", "back\\slash", "größe"])
seconds = st.one_of(
    st.sampled_from([*_SECONDS, *_DECISION_SECONDS]),
    st.sampled_from([math.nextafter(bound, bound + 1) for bound in (*_SECONDS, *_DECISION_SECONDS)]),
    st.floats(0, 1e6, allow_nan=False),
)
figures = st.sampled_from([figure for _, _, figure in _COUNTERS])
ends = st.sampled_from(["complete", "broken", "cancelled", "failed"])
events = st.one_of(
    st.tuples(st.just("end"), workers, st.sampled_from([200, 404, 499, 502]), ends),
    st.tuples(st.just("count"), workers, figures, st.integers(0, 100_000)),
    st.tuples(st.just("time"), workers, st.sampled_from(["first_byte", "duration"]), seconds),
    st.tuples(st.just("decide"), seconds, st.integers(0, 10**12), st.integers(0, 10**12)),
    st.tuples(st.just("refuse"), st.sampled_from(["ttft", "tbt"])),
    st.tuples(st.just("part"), seconds, st.none() | seconds, seconds),
    st.tuples(st.just("fail"), st.sampled_from(["prefill", "decode"])),
    st.tuples(st.just("in_flight"), st.sampled_from([1, -1])),
)


def test_before_anything_was_counted() -> None:
    Both().check()


@given(st.lists(events, max_size=30))
def test_the_same_events_are_shown_the_same(happened: list[tuple[object, ...]]) -> None:
    both = Both()
    for name, *values in happened:
        getattr(both, str(name))(*values)
    both.check()


@pytest.mark.parametrize("bound", _SECONDS)
def test_a_bound_belongs_to_the_bucket_that_it_ends(bound: float) -> None:
    both = Both()
    for value in (bound, math.nextafter(bound, 0), math.nextafter(bound, math.inf)):
        both.time("a", "first_byte", value)
    both.check()


def test_answers_that_take_minutes_are_told_apart() -> None:
    """Beyond the last bound Prometheus tells that bound for any quantile: thousands of tokens take minutes."""
    both = Both()
    for minutes in (1, 3, 8):
        both.time("a", "duration", 60.0 * minutes)
    told = exposed(both.registry)["router_request_seconds"][2]
    bounds = ("60.0", "120.0", "300.0", "600.0", "+Inf")
    counts = [told["router_request_seconds_bucket", frozenset({("worker", "a"), ("le", le)})] for le in bounds]
    assert counts == [1, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("status", "end", "first_byte", "decoded"),
    [
        (200, "complete", 2.0, 1),
        (502, "broken", 2.0, 1),  # after its beginning
        (499, "cancelled", 2.0, 1),
        (499, "cancelled", None, 0),  # while its KV was moved
        (500, "complete", 2.0, 0),  # the decode worker could not fetch its KV
        (502, "failed", None, 0),
    ],
)
def test_in_two_parts_was_served_what_was_decoded(
    status: int, end: End, first_byte: float | None, decoded: int
) -> None:
    tallies = Tallies()
    tallies.finished(Outcome(None, status, end, first_byte, 3.0, None, None, Parted("p", 1.0, 0.5, Prefilled())), True)
    assert tallies.parted.requests == decoded
    assert sum(tallies.worker("").first_byte._counts) == decoded, "errors say nothing of how long an answer takes"
    assert (tallies.parted.prefill.sum, tallies.parted.decode.sum) == (1.0, float(decoded))


def test_what_one_worker_served_alone_is_not_counted_as_served_in_two_parts() -> None:
    tallies = Tallies()
    tallies.finished(Outcome(None, 200, "complete", 2.0, 3.0, None, None), True)
    assert (tallies.parted.requests, tallies.parted.decode.sum) == (0, 0.0)


def test_asking_twice_counts_once() -> None:
    both = Both()
    both.decide(0.5, 3, 5)
    both.time("a", "duration", 2.0)
    first = generate_latest(both.registry)
    assert generate_latest(both.registry) == first


def test_histograms_do_not_share_their_counts() -> None:
    tallies = Tallies()
    tallies.worker("a").first_byte.observe(1.0)
    assert sum(tallies.worker("a").first_byte._counts) == 1
    assert sum(tallies.worker("a").duration._counts) == sum(tallies.worker("b").first_byte._counts) == 0
    assert sum(Histogram(_SECONDS)._counts) == 0


async def test_a_models_name_does_not_end_a_line_of_the_common_page() -> None:
    metrics, name = Metrics(), "a\u2028b\x85c\x0cd"
    metrics.tokenizer_mismatches.labels(name).inc()
    page = (await merge({0: await metrics.page(), 1: await metrics.page()})).decode()
    told = [line for line in page.split("\n") if line.startswith("router_tokenizer_mismatches_total{")]
    assert told == [f'router_tokenizer_mismatches_total{{process="{number}",model="{name}"}} 1.0' for number in (0, 1)]


async def test_the_page_is_made_in_turns_with_all_else() -> None:
    """Tokens of streams wait for one family of it at most."""
    metrics, turns = Metrics(), 0
    for number in range(200):
        metrics.tallies.worker(f"w{number}").retries += 1

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            metrics.tallies.worker(f"late {turns}")  # what is told of may change meanwhile
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    page = await metrics.page()
    others.cancel()
    assert turns >= page.count(b"# TYPE router_") / 2  # counters tell of their beginning in a family of its own
    again = await metrics.page()
    assert again.count(b"late") > 0
    assert _without_process(again) == _without_process(generate_latest(metrics.registry))


async def test_a_page_of_many_workers_holds_nothing_up() -> None:
    """Neither in making it nor in joining those of several processes: other work runs after each few samples."""
    metrics = Metrics()
    for number in range(1000):
        metrics.tallies.worker(f"w{number}")

    with other_work() as turns:
        page = await metrics.page()
        assert turns.taken >= page.count(b"\n") / 1000
        turns.taken = 0
        both = await merge({0: page, 1: page})
    assert turns.taken >= both.count(b"\n") / 1000 - 1 + both.count(b"# TYPE ")  # and each family is put together apart
    assert _without_process(page) == _without_process(generate_latest(metrics.registry))


async def test_what_is_read_from_the_state_is_read_in_turns_with_all_else() -> None:
    """Four thousand ranks have a hundred thousand figures."""
    metrics, seen = Metrics(), list[int]()

    def read() -> Iterator[tuple[tuple[str, ...], float]]:
        for number in range(10 * PIECE):
            seen.append(turns.taken)
            yield (f"{number}",), 1.0

    metrics.observe("router_numbers", "Many.", ("number",), read)
    with other_work() as turns:
        page = await metrics.page()
    assert page.count(b"router_numbers{") == 10 * PIECE
    assert max(Counts(seen).values()) <= PIECE


async def test_joining_pages_takes_little_more_memory_than_they_do() -> None:
    """What was split into lines as a whole took several times as much, and held everybody up."""
    metrics = Metrics()
    metrics.observe("router_numbers", "Many.", ("number",), lambda: [((f"{n}",), 1.0) for n in range(10_000)])
    page = await metrics.page()
    tracemalloc.start()
    both = await merge({0: page, 1: page})
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 * len(both)


async def test_the_page_is_what_their_own_code_makes_of_it() -> None:
    metrics, odd = Metrics(), 'a"b\\c\nd\u2028\u00e9'
    metrics.tallies.worker(odd).ends[200, odd] += 1
    metrics.tallies.worker(odd).first_byte.observe(1e7)
    for model in (odd, "m"):
        metrics.tokenizer_mismatches.labels(model).inc()
    numbers = [((f"{at}",), number) for at, number in enumerate((math.inf, -math.inf, math.nan, 1e17, 1e-7, -0.0, 3))]
    metrics.observe("router_numbers", "How they're written.", ("at",), lambda: numbers)
    assert _without_process(await metrics.page()) == _without_process(generate_latest(metrics.registry))


def _without_process(page: bytes) -> list[bytes]:
    """What the system tells of this process changes at any time."""
    return [line for line in page.splitlines() if not line.startswith(b"process_")]


def test_workers_that_have_left_are_told_no_more() -> None:
    tallies = Tallies()
    for name in ("", "a", "b"):
        tallies.worker(name).retries += 1
    tallies.keep({"b", "c"})
    assert {name: tally.retries for name, tally in tallies._workers.items()} == {"": 1, "b": 1}


def test_a_prefill_worker_that_has_left_is_told_no_more_when_its_requests_end() -> None:
    """Its part was over: it may leave while others still decode."""
    tallies = Tallies()
    parted = Parted("p", 1.0, 0.5, Prefilled(cached_tokens=64))
    outcome = Outcome(None, 200, "complete", 2.0, 3.0, 100, 64, parted)
    tallies.worker("p")
    tallies.finished(outcome, True)
    assert tallies.worker("p").reported_tokens == 64
    tallies.keep({"d"})
    tallies.finished(outcome, True)
    assert "p" not in tallies._workers
