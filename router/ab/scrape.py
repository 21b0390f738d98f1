"""Reads the metrics of a live A/B test's arms from its routers (pure but for `fetch`)."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from publishers.reasons import reason_of
from router.ab.errors import RunError
from router.page.intervals import NORMAL_95, Interval

_ANSWER = aiohttp.ClientTimeout(total=10)
_PREFIX = "router_ab_"


class Times:
    """A histogram of seconds, summed over routers and processes."""

    def __init__(self) -> None:
        self.total = 0.0
        self._up_to: defaultdict[float, float] = defaultdict(float)
        """The number of observations at or below each bound."""

    def add(self, suffix: str, bound: str, value: float) -> None:
        if suffix == "sum":
            self.total += value
        elif suffix == "bucket":
            self._up_to[float(bound)] += value

    @property
    def count(self) -> float:
        return self._up_to.get(math.inf, 0.0)

    @property
    def mean(self) -> float:
        """The mean, which is exact, since a histogram has the sum."""
        return self.total / self.count if self.count else math.nan

    @property
    def mean_error(self) -> float:
        """The standard error of the mean, with observations taken to be spread evenly within their bucket."""
        if self.count < 2:
            return math.nan
        squares = sum(
            count * (((low + high) / 2) ** 2 + (high - low) ** 2 / 12) for low, high, count in self._buckets()
        )
        middles = sum(count * (low + high) / 2 for low, high, count in self._buckets())
        variance = max(0.0, squares / self.count - (middles / self.count) ** 2)
        return math.sqrt(variance / (self.count - 1))

    def quantile(self, share: float) -> float:
        """A quantile, interpolated within its bucket."""
        if not self.count:
            return math.nan
        wanted, passed = share * self.count, 0.0
        for low, high, count in self._buckets():
            if passed + count >= wanted and count:
                return low + (high - low) * max(0.0, wanted - passed) / count
            passed += count
        return math.nan

    def mean_interval(self) -> Interval:
        if self.count < 2:
            return Interval(self.mean)
        half = NORMAL_95 * self.mean_error
        return Interval(self.mean, self.mean - half, self.mean + half)

    def quantile_interval(self, share: float) -> Interval:
        """Between the quantiles of ranks as much lower and higher as chance may have moved its own, which holds where
        times leap too. Of few values the slowest are yet to come: as far at least as nearer ranks let expect."""
        value = self.quantile(share)
        if self.count < 2:
            return Interval(value)
        error = math.sqrt(share * (1 - share) / self.count)
        low, high = self._around(share, NORMAL_95 * error)
        if share + NORMAL_95 * error > 1:
            near, far = self._around(share, error)
            half = NORMAL_95 * (far - near) / 2
            low, high = min(low, value - half), max(high, value + half)
        return Interval(value, low, high)

    def _around(self, share: float, ranks: float) -> tuple[float, float]:
        return self.quantile(max(0.0, share - ranks)), self.quantile(min(1.0, share + ranks))

    def _buckets(self) -> list[tuple[float, float, float]]:
        """(low, high, count) of each bucket. The last is open, so its width is estimated from what the others
        leave of the sum."""
        bounds = [0.0, *sorted(self._up_to)]
        counts = [after - before for before, after in pairwise((0.0, *(self._up_to[bound] for bound in bounds[1:])))]
        *closed, last = zip(bounds[:-1], bounds[1:], counts, strict=True)
        low, _, count = last
        rest = self.total - sum(number * (start + end) / 2 for start, end, number in closed)
        return [*closed, (low, max(low, 2 * rest / count - low) if count else low, count)]


class ArmCounts:
    """The metrics of one arm."""

    def __init__(self) -> None:
        self.ends: defaultdict[str, float] = defaultdict(float)
        self.tokens: defaultdict[str, float] = defaultdict(float)
        """Token counts, by the end of the metric's name."""
        self.first_byte = Times()
        self.duration = Times()

    @property
    def requests(self) -> float:
        return sum(self.ends.values())


def read_arms(pages: Iterable[str]) -> dict[str, ArmCounts]:
    """The arms of all routers together, in the order of the first. Raises RunError for a page that is not metrics."""
    arms: defaultdict[str, ArmCounts] = defaultdict(ArmCounts)
    try:
        for page in pages:
            _read_page(page, arms)
    except (ValueError, KeyError) as error:
        raise RunError(f"metrics that cannot be read: {error}; is each URL a router's?") from None
    return dict(arms)


def _read_page(page: str, arms: defaultdict[str, ArmCounts]) -> None:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX) and "arm" in sample.labels:
                _count(arms[sample.labels["arm"]], sample.name.removeprefix(_PREFIX), sample.labels, sample.value)


def _count(arm: ArmCounts, name: str, labels: dict[str, str], value: float) -> None:
    figure, _, suffix = name.rpartition("_")
    if figure == "first_byte_seconds":
        arm.first_byte.add(suffix, labels.get("le", ""), value)
    elif figure == "request_seconds":
        arm.duration.add(suffix, labels.get("le", ""), value)
    elif name == "requests_total":
        arm.ends[labels["end"]] += value
    elif suffix == "total":
        arm.tokens[figure] += value


async def fetch(urls: Sequence[str], key: str | None, context: ssl.SSLContext | None = None) -> list[str]:
    """The /metrics of every router, asked for with the API key if there is one. `context` is for HTTPS; None trusts the
    system's certificate authorities. Raises RunError for a router that does not answer, refuses the key or has no
    test."""
    headers, connector = {"authorization": f"Bearer {key}"} if key else {}, aiohttp.TCPConnector(ssl=context or True)
    async with aiohttp.ClientSession(connector=connector, timeout=_ANSWER, headers=headers) as session:
        return list(await asyncio.gather(*(_fetch(session, url) for url in urls)))


def metrics_of(url: str) -> str:
    """The URL of a router's metrics, however the router's URL is written."""
    return f"{url.rstrip('/').removesuffix('/metrics')}/metrics"


async def _fetch(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(metrics_of(url)) as answer:
            status, page = answer.status, await answer.text()
    except aiohttp.ClientSSLError as error:
        raise RunError(f"{url} cannot be asked: {reason_of(error, '--ca')}") from None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise RunError(f"{url} does not answer: {reason_of(error)}; is a router there?") from None
    if status in {401, 403}:
        raise RunError(f"{url} shows its metrics to admins only; give an admin's key by --key-file")
    if status != 200:
        raise RunError(f"{metrics_of(url)} answered {status}; give a router's address, http://HOST:PORT")
    if f"{_PREFIX}requests" not in page:
        raise RunError(f"{url} splits no traffic; start that router with --ab kv:90,round-robin:10, say")
    return page
