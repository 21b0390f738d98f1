"""The report on live traffic: from pages of metrics to columns."""

from __future__ import annotations

import asyncio
import io
import math
import random
import statistics
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from rich.console import Console

from router.ab import live
from router.ab.cli import main
from router.ab.errors import RunError
from router.ab.live import comparison
from router.ab.scrape import ArmCounts, Times, read_arms
from router.arms import SECONDS, Arm, Arms, ArmTally
from router.metrics.registry import merge
from router.metrics.tallies import Histogram, histogram_family
from router.page.html import page
from router.page.results import HITS, TTFT_MEAN
from router.proxy.outcome import Outcome
from router.scheduling.decision import Policy
from tests.certificates import Authority
from tests.fakes.scripted_worker import ScriptedWorker
from tests.router.proxy.running import running

from .test_ab_cli import engine


def observed(values: list[float]) -> Times:
    """As it comes from a page."""
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.observe(value)

    class Shown(Collector):
        def collect(self) -> list[Metric]:
            return [histogram_family("router_ab_first_byte_seconds", "x", ("arm",), [(("kv",), histogram)])]

    registry = CollectorRegistry()
    registry.register(Shown())
    return read_arms([generate_latest(registry).decode()])["kv"].first_byte


@pytest.mark.parametrize(("median", "sigma"), [(0.37, 0.3), (0.37, 1.0), (0.37, 1.5), (90, 0.8)])
def test_what_a_histogram_tells_of_times(median: float, sigma: float) -> None:
    """The mean exactly, the rest to a fifth: narrow times look wider in their buckets. Long answers take minutes."""
    rng = random.Random(3)
    values = [rng.lognormvariate(math.log(median), sigma) for _ in range(20_000)]
    times = observed(values)
    assert times.count == len(values)
    assert times.mean == pytest.approx(statistics.fmean(values))
    assert times.mean_error == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), rel=0.2)
    for cut in (50, 90, 99):
        assert times.quantile(cut / 100) == pytest.approx(statistics.quantiles(values, n=100)[cut - 1], rel=0.2)


def test_times_beyond_the_last_bucket_are_not_lost() -> None:
    times = observed([1.0] * 10 + [5000.0, 7000.0])
    assert times.quantile(0.99) > 3000
    assert times.mean_error > 300


def test_no_times() -> None:
    times = observed([])
    assert (times.count, math.isnan(times.mean), math.isnan(times.quantile(0.5))) == (0, True, True)
    assert math.isnan(observed([1.0]).mean_error)


def outcome(ttft: float, end: str = "complete", status: int = 200) -> Outcome:
    return Outcome(None, status, end, ttft, ttft + 1, 100, 60)  # type: ignore[arg-type]


def told(**ttfts: float) -> str:
    """A router's page whose arms answered 200 requests each, and broke off one, with TTFTs around these."""
    arms = []
    for name, ttft in ttfts.items():
        arm = Arm(name.replace("_", "-"), cast("Policy", None))
        tell(arm.tally, ttft)
        arms.append(arm)
    registry = CollectorRegistry()
    registry.register(Arms(arms, [1.0] * len(arms), None, random.Random(0)))
    return generate_latest(registry).decode()


def tell(tally: ArmTally, ttft: float) -> None:
    rng = random.Random(0)
    for _ in range(200):
        tally.prompt_tokens += 100
        tally.predicted_tokens += 50
        tally.finished(outcome(ttft * rng.lognormvariate(0, 0.5)))
    tally.finished(outcome(ttft, "broken"))


def test_arms_side_by_side() -> None:
    compared = comparison(read_arms([told(kv=0.1, round_robin=0.2)]), None, ["http://r"], ("kv-router", "ab"))
    assert (compared.policies, compared.baseline) == (["kv", "round-robin"], "round-robin")
    kv = compared.results[0].values
    assert (kv["requests"], kv["share of requests %"]) == (201, 50)
    assert kv["failed or cancelled %"] == pytest.approx(100 / 201)
    assert (kv[HITS], kv["expected cached prompt tokens %"]) == (60, 50)
    ratio = compared.ratio(TTFT_MEAN, "kv", 1.0)
    assert ratio.mean == pytest.approx(0.5)
    assert ratio.low is not None
    assert 0.4 < ratio.low < 0.5
    p99 = compared.ratio("TTFT s p99", "kv", 1.0)
    assert p99.low is not None
    assert p99.low < ratio.low, "less is known of it than of the mean"
    assert compared.mean(TTFT_MEAN, "kv", 1.0).half == pytest.approx(0.1 * 0.6 / math.sqrt(200) * 1.96, rel=0.2)


def test_an_arm_whose_every_answer_is_an_error_has_failed() -> None:
    """The workers' own errors are passed on completely."""
    arms = [Arm(name, cast("Policy", None)) for name in ("kv", "random")]
    for status, arm in zip((200, 500), arms, strict=True):
        for _ in range(3):
            arm.tally.finished(outcome(0.1, status=status))
    registry = CollectorRegistry()
    registry.register(Arms(arms, [1.0, 1.0], None, random.Random(0)))
    compared = comparison(read_arms([generate_latest(registry).decode()]), None, ["http://r"], ())
    assert [result.values["failed or cancelled %"] for result in compared.results] == [0, 100]
    assert math.isnan(compared.results[1].values[TTFT_MEAN])


def test_a_request_that_ends_while_the_page_is_made_has_not_failed() -> None:
    arm = ArmCounts()
    arm.ends["complete"], arm.first_byte = 2, observed([0.1, 0.2, 0.3])
    values = comparison({"kv": arm}, None, ["http://r"], ()).results[0].values
    assert values["failed or cancelled %"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("figure", [TTFT_MEAN, "TTFT s p50", "TTFT s p99"])
def test_two_arms_that_are_the_same_do_not_differ(figure: str) -> None:
    """In 95 of 100 tests or more, as far as histograms tell what lies within a bucket."""
    rng, held, times = random.Random(7), 0, 300
    for _ in range(times):
        here, there = (ArmCounts() for _ in range(2))
        for arm in (here, there):
            arm.ends["complete"] = 250
            arm.first_byte = observed([rng.lognormvariate(-1, 1) for _ in range(250)])
        ratio = comparison({"kv": here, "kv#2": there}, None, ["http://r"], ()).ratio(figure, "kv#2", 1.0)
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= 1 <= ratio.high
    assert held / times > 0.915


def test_an_arm_whose_first_request_is_under_way_has_nothing_to_tell_yet() -> None:
    lines = ['router_ab_requests_total{arm="random",end="complete"} 1.0']
    lines += [f'router_ab_prompt_tokens_total{{arm="{arm}"}} 100.0' for arm in ("kv", "random")]
    compared = comparison(
        read_arms(["\n".join(["# TYPE router_ab_requests counter", *lines, ""])]), None, ["http://r"], ()
    )
    values = {result.policy: result.values["prompt tokens mean"] for result in compared.results}
    assert values["random"] == 100
    assert math.isnan(values["kv"])
    assert "random" in page(compared)


def test_one_of_a_hundred_answers_that_hang_leaves_the_p99_open() -> None:
    rng, arms = random.Random(1), {name: ArmCounts() for name in ("kv", "random")}
    for arm in arms.values():
        arm.ends["complete"] = 1000
        arm.first_byte = observed([rng.lognormvariate(-3, 0.3) for _ in range(991)] + [600.0] * 9)
    compared = comparison(arms, None, ["http://r"], ())
    ratio = compared.ratio("TTFT s p99", "kv", 1.0)
    assert ratio.low is not None
    assert ratio.high is not None
    assert (ratio.low < 0.01, ratio.high > 100) == (True, True)
    assert "TTFT s p99" in page(compared)


def test_the_curve_ends_with_the_slowest_answer() -> None:
    arm = ArmCounts()
    arm.ends["complete"], arm.first_byte = 1000, observed([0.1] * 997 + [600.0] * 3)
    (result,) = comparison({"kv": arm}, None, ["http://r"], ()).results
    assert (min(result.ttft) < 0.1, result.ttft[100] < 0.15, max(result.ttft) >= 600) == (True, True, True)


@pytest.mark.parametrize("cut", [50, 90, 99])
def test_a_quantile_lies_in_its_interval_where_times_leap(cut: int) -> None:
    """As where that many prompts are found cached: the others take thirty times as long."""
    rng, held, times, share = random.Random(cut), 0, 300, cut / 100

    def drawn(count: int) -> Times:
        return observed([rng.lognormvariate(-3 if rng.random() < share else 0.5, 0.2) for _ in range(count)])

    truth = drawn(100_000).quantile(share)
    for _ in range(times):
        found = drawn(500).quantile_interval(share)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    assert held / times > 0.92


async def test_processes_and_routers_add_up() -> None:
    one = told(kv=0.1, random=0.2)
    both = read_arms([(await merge({0: one.encode(), 1: one.encode()})).decode(), one])
    alone = read_arms([one])
    assert both["kv"].requests == 3 * alone["kv"].requests
    assert both["kv"].first_byte.count == 600
    assert both["kv"].first_byte.mean == pytest.approx(alone["kv"].first_byte.mean)
    assert both["random"].tokens["prompt_tokens"] == 60_000


def test_the_page_says_how_sure_it_is() -> None:
    text = page(comparison(read_arms([told(kv=0.1, random=0.2)]), "kv", ["http://r"], ()))
    assert "deviations are read from histograms" in text
    assert text.count("<svg") == 4
    assert "±" in text
    assert "fewer than" not in text


def test_an_address_is_told_as_it_is() -> None:
    stream = io.StringIO()
    live._show(comparison(read_arms([told(kv=1)]), None, ["http://[fd00::1]:8080"], ()), Console(file=stream))
    assert stream.getvalue().startswith("201 requests since the start of http://[fd00::1]:8080\n")


@pytest.mark.parametrize(
    ("arms", "baseline", "says"),
    [
        (
            read_arms([told(kv=1, random=1)]),
            "least-loaded",
            "there is no arm 'least-loaded'; there are kv, random",
        ),
        ({}, None, "served no request of any arm yet"),
    ],
)
def test_nothing_to_compare(arms: dict[str, object], baseline: str | None, says: str) -> None:
    with pytest.raises(RunError, match=says):
        comparison(arms, baseline, ["http://r"], ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "page",
    [
        "<html>router_ab_requests {{{",
        'router_ab_requests_total{arm="kv"} 5',
        'router_ab_requests_total{arm="kv",end="complete"} x',
        'router_ab_first_byte_seconds_bucket{arm="kv",le="q"} 3',
    ],
)
def test_a_page_that_is_no_routers(page: str) -> None:
    with pytest.raises(RunError, match="metrics that cannot be read"):
        read_arms([told(kv=1), page])


def test_few_answers_are_warned_of() -> None:
    arms = read_arms([told(kv=1, random=1)])
    arms["kv"].first_byte = observed([1.0] * 99)
    compared = comparison(arms, None, ["http://r"], ())
    assert [len(result.warnings) for result in compared.results] == [1, 0]


def test_a_router_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "http://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert said == "kv-router ab report: http://127.0.0.1:1 does not answer: Connection refused; is a router there?\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "required: URL"),
        (["--frobnicate", "http://r"], "unrecognized"),
        (["foo"], "'foo' is not a router's address; it looks like http://HOST:PORT"),
        (["host:80"], "'host:80' is not a router's address"),
        (["http://"], "'http://' is not a router's address"),
        (["http://h:1", "http://g:1", "http://h:1/"], "http://h:1/ is named twice"),
        (["http://h:1", "http://h:1/metrics"], "http://h:1/metrics is named twice"),
        (["http://h:99999"], "'http://h:99999' is not a URL: Port out of range"),
        (["http://[::1]8000"], "'http://[::1]8000' is not a URL: something stands beside"),
    ],
)
def test_mistakes_are_one_sentence(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *argv]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "http://127.0.0.1:1", "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "give --html another FILE" in capsys.readouterr().err


def test_a_router_with_keys_tells_admins_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text("kvr-ops\n", "utf-8")
    with engine(resets=True, key=b"kvr-ops") as (url, heads):
        assert main(["report", url]) == 2
        assert f"{url} shows its metrics to admins only; give an admin's key by --key-file" in capsys.readouterr().err
        assert main(["report", url, "--key-file", str(file)]) == 2
        assert f"{url}/metrics answered 404" in capsys.readouterr().err  # it has none, but refuses the key no more
    assert heads == [b"GET /metrics"] * 2


def test_a_key_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "http://127.0.0.1:1", "--key-file", str(tmp_path / "nowhere")]) == 2
    assert "nowhere cannot be read: No such file or directory." in capsys.readouterr().err


async def test_a_router_that_speaks_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "other")
    pair = ours.pair("127.0.0.1")
    async with ScriptedWorker() as worker, running(worker, tls_cert=pair.cert, tls_key=pair.key) as router:
        arguments = ["report", f"https://127.0.0.1:{router.port}"]
        for more, says in (
            ([], "certificate is not trusted (unable to get local issuer certificate); see --ca"),
            (["--ca", theirs.file], "certificate is not trusted"),
            (["--ca", pair.key], "--ca: "),
            (["--ca", ours.file], "splits no traffic"),
        ):
            assert await asyncio.to_thread(main, [*arguments, *more]) == 2
            assert says in capsys.readouterr().err


async def test_a_router_without_a_test(capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedWorker() as worker, running(worker) as router:
        url = f"http://127.0.0.1:{router.port}"
        assert await asyncio.to_thread(main, ["report", url]) == 2
    assert f"{url} splits no traffic; start that router with --ab" in capsys.readouterr().err


def test_an_address_below_which_there_are_no_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as that for clients, which ends in /v1: the router there may well split its traffic."""
    with engine(resets=True) as (url, _):
        assert main(["report", f"{url}/v1"]) == 2
    told = f"{url}/v1/metrics answered 404; give a router's address, http://HOST:PORT"
    assert capsys.readouterr().err == f"kv-router ab report: {told}\n"
