"""`python -m router ab report`: the arms of a running router, or of several, side by side."""

from __future__ import annotations

import argparse
import asyncio
import math
import ssl
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from shlex import join

from rich.console import Console

from publishers.credentials import client_context, read_key
from router.ab.errors import RunError
from router.ab.flags import Parser, check_writable, router_url, tell_written, write_all
from router.ab.report import table
from router.ab.scrape import ArmCounts, Times, fetch, metrics_of, read_arms
from router.page.html import page
from router.page.intervals import Interval
from router.page.results import HITS, TTFT_MEAN, TTFT_P99, Comparison, Figure, Result

FIGURES = (
    Figure("requests", "{:,.0f}", compared=False),
    Figure("share of requests %", "{:.2f}", compared=False),
    Figure("failed or cancelled %", "{:.2f}", compared=False),
    Figure(TTFT_MEAN),
    *(Figure(f"TTFT s p{cut}") for cut in (50, 90, 99)),
    Figure("E2E s mean"),
    *(Figure(f"E2E s p{cut}") for cut in (50, 99)),
    Figure("prompt tokens mean", "{:,.0f}"),
    Figure(HITS, "{:.1f}"),
    Figure("expected cached prompt tokens %", "{:.1f}"),
)
INTERVALS = (
    "Intervals (95 %) of means are from standard errors: deviations are read from histograms, in which requests are "
    "taken to lie evenly within each bucket. Those of quantiles are by rank, whatever the distribution (± is the "
    "longer side); those of ratios are of their logarithms. Requests are taken to be independent. Those of one session "
    "or one rush are not, so the truth is less certain than that."
)
_POINTS = 200
"""Steps of the curve of a distribution, from the fastest to the slowest."""


def make_parser() -> argparse.ArgumentParser:
    about = "Compares the arms of a live A/B test (--ab), by what running routers have counted since their start."
    parser = Parser(prog="kv-router ab report", description=about, allow_abbrev=False)
    parser.add_argument(
        "url", nargs="+", type=router_url, metavar="URL", help="address of a router; the counts of several are added up"
    )
    parser.add_argument(
        "--baseline", metavar="ARM", help="arm that the others are compared with (default: the first that is not kv)"
    )
    parser.add_argument("--key-file", metavar="FILE", help="file with an admin's API key, for routers with --api-keys")
    parser.add_argument(
        "--ca",
        metavar="FILE",
        help="authorities (PEM) that sign the certificates of https routers (default: the system's)",
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as a page with charts")
    return parser


def _check_distinct(urls: Sequence[str]) -> None:
    """Refuses a router named twice: its requests would be counted twice."""
    pages = [metrics_of(url) for url in urls]
    for place, url in enumerate(urls):
        if pages[place] in pages[:place]:
            raise RunError(f"{url} is named twice, and would be counted twice; name each router once")


def _access(given: argparse.Namespace) -> tuple[str | None, ssl.SSLContext | None]:
    try:
        key = read_key("--key-file", given.key_file) if given.key_file else None
        return key, client_context("-", given.ca, None, None)
    except ValueError as error:
        raise RunError(str(error)) from None


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for what cannot be reported or written."""
    try:
        given = make_parser().parse_args(argv)
        _check_distinct(given.url)
        check_writable("--html", given.html)
        arms = read_arms(asyncio.run(fetch(given.url, *_access(given))))
        compared = comparison(arms, given.baseline, given.url, ("kv-router", "ab", "report", *argv))
    except RunError as error:
        sys.stderr.write(f"kv-router ab report: {error}\n")
        return 2
    console = Console(width=None if sys.stdout.isatty() else 120)
    files = {given.html: page(compared).encode()} if given.html else {}
    written = write_all("kv-router ab report", files)  # before what is printed, which may have nowhere to go
    _show(compared, console)
    tell_written(written, console)
    return 0 if len(written) == len(files) else 2


def comparison(
    arms: Mapping[str, ArmCounts], baseline: str | None, urls: Sequence[str], command: Sequence[str]
) -> Comparison:
    """Raises RunError when there is nothing to compare yet."""
    if not any(arm.requests for arm in arms.values()):
        raise RunError(f"{', '.join(urls)} served no request of any arm yet; ask again later")
    base = baseline or next((name for name in arms if not name.startswith("kv")), next(iter(arms)))
    if base not in arms:
        raise RunError(f"there is no arm {base!r}; there are {', '.join(arms)}")
    whole = sum(arm.requests for arm in arms.values())
    return Comparison(
        title=f"Live traffic compared: {', '.join(arms)}",
        about=f"{whole:,.0f} requests since the start of {', '.join(urls)}",
        results=[_result(name, arm, whole) for name, arm in arms.items()],
        baseline=base,
        figures=FIGURES,
        rate_unit="",
        times="Seconds are real; the first byte of an answer that is not streamed is its whole.",
        facts=[("command", join(command)), ("read", datetime.now(UTC).isoformat(timespec="seconds"))],
        intervals=INTERVALS,
    )


def _result(name: str, arm: ArmCounts, whole: float) -> Result:
    return Result(
        policy=name,
        rate=1.0,
        seed=0,
        values=_values(arm, whole),
        intervals=_intervals("TTFT s", arm.first_byte, (50, 90, 99)) | _intervals("E2E s", arm.duration, (50, 99)),
        ttft=[arm.first_byte.quantile(step / _POINTS) for step in range(_POINTS + 1)] if arm.first_byte.count else (),
        warnings=_warnings(arm),
    )


def _values(arm: ArmCounts, whole: float) -> dict[str, float]:
    tokens, requests = arm.tokens, arm.requests
    return {
        "requests": requests,
        "share of requests %": requests / whole * 100,
        "failed or cancelled %": _failed(arm),
        **_times("TTFT s", arm.first_byte, (50, 90)),
        TTFT_P99: arm.first_byte.quantile(0.99),
        **_times("E2E s", arm.duration, (50, 99)),
        "prompt tokens mean": tokens["prompt_tokens"] / requests if tokens["prompt_tokens"] and requests else math.nan,
        HITS: _share(tokens["reported_cached_tokens"], tokens["reported_prompt_tokens"]),
        "expected cached prompt tokens %": _share(tokens["predicted_cached_tokens"], tokens["prompt_tokens"]),
    }


def _failed(arm: ArmCounts) -> float:
    """In percent. A page of metrics is made while requests end, and tells of times after it told of requests."""
    return _share(max(0.0, arm.requests - arm.first_byte.count), arm.requests)


def _times(title: str, times: Times, cuts: Sequence[int]) -> dict[str, float]:
    return {f"{title} mean": times.mean} | {f"{title} p{cut}": times.quantile(cut / 100) for cut in cuts}


def _intervals(title: str, times: Times, cuts: Sequence[int]) -> dict[str, Interval]:
    quantiles = {f"{title} p{cut}": times.quantile_interval(cut / 100) for cut in cuts}
    return {f"{title} mean": times.mean_interval()} | quantiles


def _share(part: float, whole: float) -> float:
    return part / whole * 100 if whole else math.nan


_FEW = 100
"""Answers of which the slowest is the p99."""


def _warnings(arm: ArmCounts) -> list[str]:
    if arm.first_byte.count >= _FEW:
        return []
    return [f"fewer than {_FEW} answers: its p99 is the slowest of them, and its interval is not to be relied on"]


def _show(compared: Comparison, console: Console) -> None:
    console.print(compared.about, markup=False, highlight=False, soft_wrap=True)
    console.print(table(compared, compared.rates[0], real=True))
    told = f"In brackets: the ratio to {compared.baseline}. {compared.intervals}"
    console.print(told, highlight=False, soft_wrap=True)
    for result in compared.results:
        for warning in result.warnings:
            console.print(f"[yellow]warning[/] {result.policy}: {warning}", highlight=False, soft_wrap=True)
