"""What the router counts, under /metrics. Every name here is explained in docs/metrics.md, which a test checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DECISION_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)

Sample = tuple[tuple[str, ...], float]
"""Label values and the value."""


class Metrics:
    """One registry per router, so that several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._workers: dict[str, WorkerMetrics] = {}
        self.requests = Counter(
            "router_requests",
            "Requests by worker, status and how they ended.",
            ["worker", "status", "end"],
            registry=self.registry,
        )
        self.retries = Counter(
            "router_retries",
            "Requests sent on to another worker before their first byte.",
            ["worker"],
            registry=self.registry,
        )
        self.failures = Counter(
            "router_worker_failures",
            "Requests that a worker failed, retried or not.",
            ["worker"],
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "router_first_byte_seconds",
            "From a request read to the first byte of its answer (streamed: TTFT).",
            ["worker"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "router_request_seconds",
            "From a request read to the end of its answer.",
            ["worker"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.decision = Histogram(
            "router_decision_seconds",
            "Matching, choosing and booking for one request.",
            buckets=_DECISION_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "router_prompt_tokens", "Prompt tokens routed, where they were counted.", ["worker"], registry=self.registry
        )
        self.predicted_tokens = Counter(
            "router_predicted_cached_tokens",
            "Prompt tokens expected to be cached where they were sent.",
            ["worker"],
            registry=self.registry,
        )
        self.reported_tokens = Counter(
            "router_reported_cached_tokens",
            "Prompt tokens that the engine reported as cached.",
            ["worker"],
            registry=self.registry,
        )
        self.regret_tokens = Counter(
            "router_overlap_regret_tokens",
            "Cached tokens given up: best overlap anywhere less the chosen one.",
            registry=self.registry,
        )
        self.untokenized = Counter(
            "router_untokenized_requests",
            "Requests routed by load alone because of their tokens, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.engine_tokenized = Counter(
            "router_engine_tokenized_requests", "Requests tokenised by asking an engine.", registry=self.registry
        )
        self.tokenizer_mismatches = Counter(
            "router_tokenizer_mismatches",
            "Times the router's token ids differed from the engine's.",
            ["model"],
            registry=self.registry,
        )
        self.replays = Counter(
            "router_replays", "Replays asked of publishers, by outcome.", ["outcome"], registry=self.registry
        )
        self.undecodable = Counter(
            "router_undecodable_messages", "Event plane messages that made no sense.", ["kind"], registry=self.registry
        )
        self.in_flight = Gauge("router_requests_in_flight", "Requests being served.", registry=self.registry)

    def worker(self, worker_id: str) -> WorkerMetrics:
        """What is counted for each request, by worker; "" for requests that none was found for."""
        found = self._workers.get(worker_id)
        if found is None:
            found = self._workers[worker_id] = WorkerMetrics(self, worker_id)
        return found

    def observe(self, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Iterable[Sample]]) -> None:
        """A gauge read from the router's state whenever /metrics is asked for."""
        self.registry.register(_Reading(name, text, labels, read))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class WorkerMetrics:
    """One worker's children of the metrics, looked up once: finding them by label costs more than counting."""

    def __init__(self, metrics: Metrics, worker_id: str) -> None:
        self._requests = metrics.requests
        self._worker_id = worker_id
        self._ends: dict[tuple[int, str], Counter] = {}
        self.retries = metrics.retries.labels(worker_id)
        self.failures = metrics.failures.labels(worker_id)
        self.first_byte = metrics.first_byte.labels(worker_id)
        self.duration = metrics.duration.labels(worker_id)
        self.prompt_tokens = metrics.prompt_tokens.labels(worker_id)
        self.predicted_tokens = metrics.predicted_tokens.labels(worker_id)
        self.reported_tokens = metrics.reported_tokens.labels(worker_id)

    def ended(self, status: int, end: str) -> None:
        """Count a request that ended so."""
        counter = self._ends.get((status, end))
        if counter is None:
            counter = self._ends[status, end] = self._requests.labels(self._worker_id, str(status), end)
        counter.inc()


class _Reading(Collector):
    def __init__(self, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Iterable[Sample]]) -> None:
        self._name, self._text, self._labels, self._read = name, text, labels, read

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._read():
            family.add_metric(labels, value)
        yield family
