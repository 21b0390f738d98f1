"""What is counted with every request: plain numbers, which Prometheus reads when it asks.

`prometheus_client`'s own counters lock and look up at every step, which took a tenth of a request's time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, cast, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, Sample
from prometheus_client.registry import Collector

from router.http.clients import Cause
from router.proxy.legs import Leg, Parted
from router.proxy.outcome import Outcome
from router.scheduling.decision import Decision

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_DECISION_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class Histogram:
    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the upper ends of the buckets, ascending."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each bound, and how many values are not above it."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


class WorkerTally:
    """Of one worker's requests."""

    def __init__(self) -> None:
        self.ends: Counter[tuple[int, str]] = Counter()
        """Requests by status and how they ended."""
        self.retries = 0
        self.failures = 0
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.reported_tokens = 0
        self.first_byte = Histogram(_SECONDS)
        self.duration = Histogram(_SECONDS)


class PartedTally:
    """Of requests that were served in two parts."""

    def __init__(self) -> None:
        self.requests = 0
        self.failures: Counter[str] = Counter()
        """By the part that failed."""
        self.prefill = Histogram(_SECONDS)
        self.transfer = Histogram(_SECONDS)
        self.decode = Histogram(_SECONDS)

    def prefilled(self, parted: Parted) -> None:
        """A request has ended of which the first part was served."""
        self.prefill.observe(parted.prefill)

    def decoded(self, parted: Parted | None, decode: float | None) -> None:
        """The second part was served, too. `parted` None: before the first had answered. `decode`: seconds from the
        first byte of the answer to its end; None: it was not streamed, so its first byte tells nothing."""
        self.requests += 1
        if decode is None:
            return
        self.decode.observe(decode)
        if parted and parted.transfer is not None:  # else the answer began before the first part was told to be done
            self.transfer.observe(parted.transfer)

    def collect(self) -> Iterator[Metric]:
        yield counter_family("router_pd_requests", "Requests served in two parts.", (), [((), self.requests)])
        failures = (((part,), self.failures[part]) for part in ("prefill", "decode"))
        yield counter_family(
            "router_pd_leg_failures", "Parts that a worker failed, retried or not.", ("leg",), failures
        )
        for name, text in _PARTS.items():
            yield histogram_family(f"router_pd_{name}_seconds", text, (), [((), getattr(self, name))])


class QueueTally:
    """Of requests that were held."""

    def __init__(self) -> None:
        self.length: Callable[[], int] = int
        """Of the moment."""
        self.wait = Histogram(_SECONDS)
        self.refused: Counter[str] = Counter()
        """By the code of the error."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("router_queue_length", "Requests held in the router.", self.length())
        wait = "Time in the queue of requests that were then sent."
        yield histogram_family("router_queue_wait_seconds", wait, (), [((), self.wait)])
        counts = (((reason,), self.refused[reason]) for reason in ("queue_full", "queue_timeout"))
        yield counter_family("router_queue_refused", "Requests not held, or no longer.", ("reason",), counts)


class ClientTally:
    """Of clients' connections."""

    def __init__(self) -> None:
        self.connections: Callable[[], int] = int
        """Of the moment."""
        self.buffered: Callable[[], int] = int
        """Bytes, of the moment."""
        self.refused: Counter[str] = Counter()
        """By cause."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("router_client_connections", "Connections of clients.", self.connections())
        buffered = "Bytes of large bodies that are held, being read or until their answers' end."
        yield GaugeMetricFamily("router_buffered_bytes", buffered, self.buffered())
        counts = (((cause,), self.refused[cause]) for cause in get_args(Cause))
        yield counter_family("router_clients_refused", "Clients turned away, or cut off.", ("cause",), counts)


class Tallies(Collector):
    """All that is counted with every request."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.regret_tokens = 0
        self.stored_tokens = 0
        self.refused: Counter[str] = Counter()
        """Requests by the objective that they would have missed."""
        self.decision = Histogram(_DECISION_SECONDS)
        self.parted = PartedTally()
        self.queue = QueueTally()
        self.clients = ClientTally()
        self._workers: dict[str, WorkerTally] = {}

    def worker(self, worker_id: str) -> WorkerTally:
        """By worker; "" for requests that none was found for."""
        found = self._workers.get(worker_id)
        if found is None:
            found = self._workers[worker_id] = WorkerTally()
        return found

    def routed(self, decision: Decision) -> None:
        """A request was sent as decided."""
        tally = self.worker(decision.rank.worker_id)
        tally.prompt_tokens += decision.prompt_tokens
        if decision.overlap_tokens is not None and decision.best_overlap_tokens is not None:
            tally.predicted_tokens += decision.overlap_tokens
            self.regret_tokens += decision.best_overlap_tokens - decision.overlap_tokens
        self.stored_tokens += decision.stored_tokens

    def failed(self, leg: Leg, retried: bool) -> None:
        """A worker failed a request, or its part of one."""
        tally = self.worker(leg.worker.id)
        tally.failures += 1
        tally.retries += retried
        if leg.part != "whole":
            self.parted.failures[leg.part] += 1

    def finished(self, outcome: Outcome, streamed: bool) -> None:
        """A request has ended."""
        leg = outcome.leg
        tally = self.worker(leg.worker.id if leg else "")
        tally.ends[outcome.status, outcome.end] += 1
        tally.duration.observe(outcome.duration)
        first_byte = None if outcome.is_error else outcome.first_byte  # an error does not tell how long answers take
        if first_byte is not None:
            tally.first_byte.observe(first_byte)
        parted = outcome.parted
        if outcome.cached_tokens is not None:
            reporter = self._workers.get(parted.prefill_worker) if parted else tally
            if reporter:  # else it has left since it computed the prompt
                reporter.reported_tokens += outcome.cached_tokens
        if parted:
            self.parted.prefilled(parted)
        # Where both parts are sent at once, the second may be over before the first has answered.
        in_two = parted is not None or (leg is not None and leg.part == "decode")
        if in_two and first_byte is not None:
            self.parted.decoded(parted, outcome.duration - first_byte if streamed else None)

    def keep(self, workers: Collection[str]) -> None:
        """Drop the metrics of all workers but these: the others have left."""
        self._workers = {name: tally for name, tally in self._workers.items() if not name or name in workers}

    def collect(self) -> Iterator[Metric]:
        yield counter_family(
            "router_requests",
            "Requests by worker, status and how they ended.",
            ("worker", "status", "end"),
            self._ends(),
        )
        for name, text, figure in _COUNTERS:
            counts = (((worker,), getattr(tally, figure)) for worker, tally in self._workers.items())
            yield counter_family(name, text, ("worker",), counts)
        for name, text, figure in _HISTOGRAMS:
            found = (((worker,), getattr(tally, figure)) for worker, tally in self._workers.items())
            yield histogram_family(name, text, ("worker",), found)
        decision = "Matching, choosing and booking for one request."
        yield histogram_family("router_decision_seconds", decision, (), [((), self.decision)])
        regret = "Cached tokens given up: best overlap anywhere less the chosen one."
        yield counter_family("router_overlap_regret_tokens", regret, (), [((), self.regret_tokens)])
        stored = "Prompt tokens expected to be loaded from the shared store."
        yield counter_family("router_predicted_store_tokens", stored, (), [((), self.stored_tokens)])
        refused = "Requests refused because they were predicted to miss an objective."
        counts = (((objective,), self.refused[objective]) for objective in ("ttft", "tbt"))
        yield counter_family("router_refused", refused, ("objective",), counts)
        yield from self.parted.collect()
        yield from self.queue.collect()
        yield from self.clients.collect()
        yield GaugeMetricFamily("router_requests_in_flight", "Requests being served.", self.in_flight)

    def _ends(self) -> Iterator[tuple[tuple[str, ...], int]]:
        for worker, tally in self._workers.items():
            for (status, end), count in tally.ends.items():
                yield (worker, str(status), end), count


def counter_family(
    name: str, text: str, labels: tuple[str, ...], counts: Iterable[tuple[tuple[str, ...], int]]
) -> CounterMetricFamily:
    """`counts`: by the labels' values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family


def histogram_family(
    name: str, text: str, labels: tuple[str, ...], histograms: Iterable[tuple[tuple[str, ...], Histogram]]
) -> HistogramMetricFamily:
    """`histograms`: by the labels' values. The samples can be read once: they are made then, piece by piece."""
    family: Any = HistogramMetricFamily(name, text, labels=labels)  # Any: compiled code insists that samples are a list
    family.samples = _samples(name, labels, list(histograms))
    return cast("HistogramMetricFamily", family)


def _samples(
    name: str, labels: tuple[str, ...], histograms: Iterable[tuple[tuple[str, ...], Histogram]]
) -> Iterator[Sample]:
    for values, histogram in histograms:
        family = HistogramMetricFamily(name, "", labels=labels)
        family.add_metric(values, histogram.buckets(), histogram.sum)
        yield from family.samples


_COUNTERS = (
    ("router_retries", "Requests that one worker failed and another was sent.", "retries"),
    ("router_worker_failures", "Requests that a worker failed, retried or not.", "failures"),
    ("router_prompt_tokens", "Prompt tokens routed, where they were counted.", "prompt_tokens"),
    (
        "router_predicted_cached_tokens",
        "Prompt tokens expected to be cached where they were sent.",
        "predicted_tokens",
    ),
    ("router_reported_cached_tokens", "Prompt tokens that the engine reported as cached.", "reported_tokens"),
)
_PARTS = {
    "prefill": "From sending the first part of a request to its answer.",
    "transfer": "From the first part's answer to the first byte of the second's, where it is streamed.",
    "decode": "From the first byte of the second part's answer to its end, where it is streamed.",
}
_HISTOGRAMS = (
    (
        "router_first_byte_seconds",
        "From a request read to the first byte of its answer, errors left out (streamed: TTFT).",
        "first_byte",
    ),
    ("router_request_seconds", "From a request read to the end of its answer.", "duration"),
)
