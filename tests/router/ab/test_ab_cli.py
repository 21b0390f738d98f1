from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.ab import cli
from router.ab.children import fleet, read_listening
from router.ab.cli import main, prepare
from router.ab.errors import RunError
from router.ab.plan import MODES, mode_of, read_plan
from router.ab.workers import served_model
from router.cli import load_settings
from router.commands import run
from router.security.worker_access import WorkerAccess
from router.settings import RouterMode
from tests.certificates import Authority
from tests.fakes.full_stream import FullStream
from tests.fakes.unread import run_unread

from .conftest import Serve, scripted
from .streams import DONE, chunked, plain, token, usage

ROW = '{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [0]}\n'


@contextmanager
def engine(
    *, resets: bool, tls: ssl.SSLContext | None = None, key: bytes | None = None, runs: int | None = None
) -> Iterator[tuple[str, list[bytes]]]:
    """A scripted engine in a thread of its own, because `main` brings its own loop. Yields its URL and the heads.
    `runs`: so many it serves."""
    heads: list[bytes] = []
    replies = {
        b"GET /v1/models": plain(b"200 OK", b'{"data":[{"id":"m"}]}'),
        b"POST /flush_cache": plain(b"200 OK" if resets else b"404 Not Found", b""),
        b"POST /v1/completions": chunked(token(), token(), usage(8, 4, 2), DONE),
    }

    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        asked = head.rpartition(b" HTTP/")[0].split(b" HTTP/")[0]
        heads.append(asked)
        over = runs is not None and heads.count(b"GET /v1/models") > runs
        reply = replies.get(b"" if over else asked, plain(b"404 Not Found", b""))
        if key is not None and b"\r\nauthorization: bearer %s\r\n" % key not in head.lower():
            reply = plain(b"401 Unauthorized", b"{}")
        writer.write(reply.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        await writer.drain()

    found: list[str] = []
    up, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def run() -> None:
        async with scripted(answer, tls) as address:
            found.append(address.url)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    up.wait()
    try:
        yield found[0], heads
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(ROW * 3)
    return str(path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--modes", "kv,foo"], "there is no mode 'foo'; --modes takes kv, round-robin"),
        (["--modes", "direct"], "there is no mode 'direct'"),
        (["--trace", "/no/such/file"], "cannot read the trace /no/such/file"),
        (["--trace", "synthetic:x"], "no synthetic trace is called 'x'"),
        (["--baseline", "random"], "the baseline random is not among the modes kv, round-robin"),
        (["--rate", "0"], "--rates/--rate: 0 is not above 0"),
        (["--rates", "1,x"], "--rates/--rate: it takes a number, not 'x'"),
        (["--seeds", "x"], "--seeds/--seed: it takes a whole number, not 'x'"),
        (["--seeds", "1,2,1"], "--seeds/--seed: 1,2,1 names one twice"),
        (["--arrivals", "x"], "--arrivals: invalid choice: 'x'"),
        (["--html", "/no/such/dir/ab.html"], "cannot write /no/such/dir/ab.html"),
        (["--limit", "x"], "--limit: it takes a whole number, not 'x'"),
        (["--duration", "0.0001"], "no request of synthetic is left"),
        (["--worker", "nonsense"], "--worker: 'nonsense' is not an engine's address"),
        (["--worker", "host:80"], "--worker: 'host:80' is not an engine's address"),
        (["--worker", "http://"], "--worker: 'http://' is not an engine's address"),
        (["--worker", "http://h:99999"], "--worker: 'http://h:99999' is not a URL: Port out of range"),
        (["--worker", "http://[::1]8000"], "--worker: 'http://[::1]8000' is not a URL: something stands beside"),
        (["--worker-api-key-file", "/no/such/file"], "--worker-api-key-file: /no/such/file cannot be read"),
        (["--worker-cert", "a.pem"], "--worker-cert needs --worker-key beside it"),
        (["--out", "/no/such/dir/ab.json"], "cannot write /no/such/dir/ab.json"),
        (["--out", "ab", "--html", "ab"], "--out and --html name the same file; give each its own"),
        (["--out", "ab", "--html", "./ab"], "--out and --html name the same file; give each its own"),
        (["--sim-workers", "2", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--worker", "http://a:1", "--sim-workers", "3"], "--sim-workers is for a simulated fleet"),
        (["--worker", "http://a:1", "--sim-arg=--x"], "--sim-arg is for a simulated fleet"),
        (
            ["--sim-arg=--speedup=8"],
            "--sim-arg: --speedup is for ab itself to set, which reports by it; give --speedup",
        ),
        (["--sim-arg=--workers", "--sim-arg=2"], "which reports by it; give --sim-workers"),
        (
            ["--router-arg=--router-mode=random"],
            "--router-arg: --router-mode is for ab itself to set, which reports by it; give --modes",
        ),
        (["--router-arg=--worker=http://a:1"], "--router-arg: --worker is for ab itself to set"),
        (["--router-arg=--seed=7"], "--router-arg: --seed is for ab itself to set, which reports by it; give --seeds"),
        (
            ["--worker", "http://a:1", "--worker-api-key-file", "mine", "--router-arg=--worker-api-key-file=other"],
            "--router-arg: --worker-api-key-file is for ab itself to set, which reports by it; give --worker-api-key",
        ),
        (["--router-arg=--worker-ca", "--router-arg=file"], "--router-arg: --worker-ca is for ab itself to set"),
        (["--router-arg=--ab", "--router-arg=kv=1"], "--router-arg: --ab is for ab itself to set"),
        (["--peer", "x=http://a:1"], "--peer names a router in front of workers that run already; name them"),
        (["--peer", "http://a:1"], "--peer: http://a:1 is not NAME=http://HOST:PORT"),
        (
            ["--peer", "kv=http://a:1"],
            "--peer: kv=http://a:1 is not NAME=http://HOST:PORT, with a name that is no mode's",
        ),
        (["--peer", "x=a:1"], "--peer: 'a:1' is not a router's address; it looks like http://HOST:PORT"),
        (["--peer", "x=http://"], "--peer: 'http://' is not a router's address"),
        (["--peer", f"x=http://{'a' * 64}:1"], "is not a router's address"),
        (["--peer", "x=http://a:b"], "--peer: 'http://a:b' is not a URL: Port could not be cast"),
        (["--peer", "x=http://a:99999"], "--peer: 'http://a:99999' is not a URL: Port out of range"),
        (["--peer", "x=http://[::1"], "--peer: 'http://[::1' is not a URL: Invalid IPv6 URL"),
        (["--peer", "x=http://a:1/v1"], "--peer: 'http://a:1/v1' ends in /v1, which"),
        (["--worker", "http://a:1", "--peer", "x=http://a:1", "--peer", "x=http://b:1"], "--peer names x twice"),
    ],
)
def test_mistakes_are_one_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_malformed_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(ROW + "[]\n")
    assert main(["--trace", str(path)]) == 2
    assert f"{path}:2: not a trace row" in capsys.readouterr().err


def test_a_run_of_months_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of timestamps in nanoseconds, say. It would wait for the second request without a word."""
    path = tmp_path / "t.jsonl"
    path.write_text(ROW + ROW.replace(": 0,", ": 3.5e10,"))
    assert main(["--trace", str(path), "--rates", "2,1", "--speedup", "10"]) == 2
    assert "the last request comes in second 3.5e+06, and a run lasts a month" in capsys.readouterr().err


def test_a_run_that_cannot_be_made_leaves_no_empty_file(tmp_path: Path) -> None:
    """It would look like a result; one of an earlier run stays."""
    out, html = tmp_path / "ab.json", tmp_path / "ab.html"
    html.write_text("of yesterday")
    assert main(["--worker", "http://127.0.0.1:1", "--limit", "1", "--out", str(out), "--html", str(html)]) == 2
    assert not out.exists()
    assert html.read_text() == "of yesterday"


def test_a_trace_from_a_pipe_is_for_one_seed(trace: str) -> None:
    pipe, writer = os.pipe()
    try:
        os.write(writer, Path(trace).read_bytes())
        os.close(writer)
        flags = ["--trace", f"/dev/fd/{pipe}", "--seeds"]
        with pytest.raises(RunError, match="is a pipe, which can be read only once; give a file"):
            prepare([*flags, "0,1"])
        assert len(prepare([*flags, "0"])[2][0]) == 3
    finally:
        os.close(pipe)


def test_a_worker_that_is_down(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(resets=True) as (url, _):
        pass
    assert main(["--trace", trace, "--modes", "none", "--worker", url]) == 2
    assert f"the worker {url} does not answer: Connection refused; start it or leave it out" in capsys.readouterr().err


@pytest.mark.slow
async def test_what_lies_in_the_working_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines.py").write_text("raise SystemExit('of the working folder')")
    monkeypatch.chdir(tmp_path)
    async with fleet(["--workers", "1", "--port", "0"]) as urls:
        assert len(urls) == 1


@pytest.mark.slow
def test_a_fleet_that_does_not_start(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", trace, "--modes", "none", "--sim-arg=--no-such-flag"]) == 2
    assert "the simulated fleet ended with status" in capsys.readouterr().err


def test_a_run_against_engines(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ab.json"
    with engine(resets=True) as (url, heads):
        assert main(["--trace", trace, "--modes", "none,none", "--worker", url, "--out", str(out)]) == 0
    assert heads.count(b"POST /v1/completions") == 6
    assert heads.count(b"POST /flush_cache") == 2  # before every mode
    found = json.loads(out.read_bytes())
    assert [mode["mode"] for mode in found["modes"]] == ["none", "none#2"]
    assert found["settings"]["speedup"] == 1.0
    assert [row["cached_tokens"] for row in found["modes"][0]["requests"]] == [4, 4, 4]
    assert "none#2" in capsys.readouterr().out


def test_another_router_is_compared(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "ab.json", tmp_path / "ab.html"
    with engine(resets=True) as (url, heads), engine(resets=True) as (theirs, asked):
        argv = ["--trace", trace, "--modes", "none", "--worker", url, "--peer", f"theirs={theirs}"]
        assert main([*argv, "--out", str(out), "--html", str(page)]) == 0
    assert heads.count(b"POST /v1/completions") == 3
    assert heads.count(b"POST /flush_cache") == 2, "the workers' caches are emptied before its run, too"
    assert asked == [b"POST /v1/completions"] * 3
    none, other = json.loads(out.read_bytes())["modes"]
    assert (none["mode"], other["mode"]) == ("none", "theirs")
    assert (none["summary"]["imbalance_requests"], other["summary"]["imbalance_requests"]) == (1.0, None)
    assert "theirs" in capsys.readouterr().out
    assert "theirs" in page.read_text("utf-8")


def test_another_router_that_is_not_there_is_told_of_first(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(resets=True) as (gone, _):
        pass
    with engine(resets=True) as (url, heads):
        assert main(["--trace", trace, "--modes", "none", "--worker", url, "--peer", f"theirs={gone}"]) == 2
    assert f"--peer theirs: nothing answers at {gone} (Connection refused); start it first" in capsys.readouterr().err
    assert heads == []


def test_what_is_printed_to_a_full_disk_costs_no_result(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    with engine(resets=True) as (url, _):
        argv = ["--trace", trace, "--modes", "none", "--worker", url]
        monkeypatch.setattr(sys, "stdout", FullStream())
        assert run(["ab", *argv, "--out", str(out)]) == 1
        sys.stdout.close()
    assert capsys.readouterr().err == "kv-router ab: No space left on device\n"
    assert len(json.loads(out.read_bytes())["modes"][0]["requests"]) == 3


@pytest.mark.slow
def test_a_reader_that_goes_away_costs_no_result(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    with engine(resets=True) as (url, _):
        argv = ["ab", "--trace", trace, "--modes", "none,none", "--worker", url, "--out", str(out)]
        assert run_unread("router", argv) == (1, "kv-router ab: Broken pipe\n")
    assert len(json.loads(out.read_bytes())["modes"]) == 2


def test_a_series_goes_through_every_rate_seed_and_mode(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html = (
        tmp_path / "ab.json",
        tmp_path / "ab [new] of a path that does not fit into what is a line without a terminal.html",
    )
    series = ["--rates", "1,2", "--seeds", "3,4", "--no-reuse", "--arrivals", "poisson", "--ttft-slo", "60"]
    with engine(resets=True) as (url, heads):
        flags = ["--worker", url, "--modes", "none,none", "--out", str(out), "--html", str(html)]
        assert main(["--trace", trace, *series, *flags]) == 0
    assert heads.count(b"POST /flush_cache") == 8
    found = json.loads(out.read_bytes())
    order = [(mode["rate"], mode["seed"], mode["mode"]) for mode in found["modes"]]
    assert order == [(rate, seed, mode) for rate in (1, 2) for seed in (3, 4) for mode in ("none", "none#2")]
    assert {mode["summary"]["in_time"] for mode in found["modes"]} == {1.0}
    assert found["trace"]["reuse"] == 0
    page = html.read_text("utf-8")
    assert "within TTFT SLO %" in page
    assert "--arrivals poisson" in page
    said = capsys.readouterr().out
    assert "none#2 at rate 2, seed 4: 3 of 3 requests done" in said
    assert f"Written to {html}" in said


def test_what_was_measured_before_a_run_failed_is_reported(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours may lie behind it. Of the last mode there is a run at the first rate only."""
    out, html = tmp_path / "ab.json", tmp_path / "ab.html"
    with engine(resets=True, runs=3) as (url, _):
        flags = ["--worker", url, "--rates", "1,2", "--out", str(out), "--html", str(html)]
        assert main(["--trace", trace, *flags, "--modes", "none,none", "--baseline", "none#2"]) == 2
    said = capsys.readouterr()
    assert "lists no model; is " in said.err
    assert said.err.endswith("; reported of 4 runs: the first 3\n")
    assert "TTFT s mean" in said.out
    modes = json.loads(out.read_bytes())["modes"]
    assert [(mode["rate"], mode["mode"]) for mode in modes] == [(1, "none"), (1, "none#2"), (2, "none")]
    assert set(modes[2]["ratios"].values()) == {None}
    assert "<svg" in html.read_text("utf-8")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_costs_one_file_only(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "ab.html"
    with engine(resets=True) as (url, _):
        flags = ["--worker", url, "--modes", "none", "--out", "/dev/full", "--html", str(html)]
        assert main(["--trace", trace, *flags]) == 2
    said = capsys.readouterr()
    assert said.err == "kv-router ab: cannot write /dev/full: No space left on device\n"
    assert said.out.endswith(f"Written to {html}\n")
    assert "<svg" in html.read_text("utf-8")


def test_what_was_measured_before_an_interruption_is_reported(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, begun = cli._measure, itertools.count()

    async def interrupted(*run: Any) -> Any:
        if next(begun):
            raise asyncio.CancelledError
        return await measure(*run)

    monkeypatch.setattr(cli, "_measure", interrupted)
    with engine(resets=True) as (url, _):
        assert main(["--trace", trace, "--worker", url, "--modes", "none,none"]) == 130
    said = capsys.readouterr()
    assert said.err.startswith("kv-router ab: interrupted; ")
    assert "TTFT s mean" in said.out


def test_a_worker_that_keeps_its_cache_is_named(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(resets=False) as (url, _):
        assert main(["--trace", trace, "--modes", "none", "--worker", url]) == 0
    assert f"modes are not comparable: {url} would not empty" in capsys.readouterr().out


def test_requests_do_not_fail_for_want_of_files_that_the_system_would_give(trace: str) -> None:
    """A shell allows 1024 as a rule, and under load more requests than that are under way."""
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
    try:
        with engine(resets=True) as (url, _):
            assert main(["--trace", trace, "--modes", "none", "--worker", url]) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))


def test_engines_that_want_a_key_and_speak_tls(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority, key = Authority(tmp_path), tmp_path / "engines.key"
    key.write_text("secret\n")
    run = ["--trace", trace, "--modes", "none"]
    with engine(resets=True, tls=authority.server(authority.pair("127.0.0.1")), key=b"secret") as (url, heads):
        assert url.startswith("https://")
        trusting = ["--worker", url, "--worker-ca", authority.file]
        assert main([*run, *trusting, "--worker-api-key-file", str(key)]) == 0
        assert heads.count(b"POST /v1/completions") == 3
        assert heads.count(b"POST /flush_cache") == 1
        assert "3 of 3 requests done" in capsys.readouterr().out
        assert main([*run, *trusting]) == 2
        assert "wants a key: status 401; give it with --worker-api-key-file" in capsys.readouterr().err
        assert main([*run, "--worker", url]) == 2
        said = capsys.readouterr().err
        assert f"the worker {url} cannot be asked: its certificate is not trusted (" in said
        assert "; see --worker-ca" in said
        assert "SSLCertVerificationError" not in said


def test_the_router_of_a_mode_asks_engines_the_same_way(tmp_path: Path) -> None:
    authority, key = Authority(tmp_path), tmp_path / "engines.key"
    key.write_text("secret")
    cert, private = authority.pair("us")
    flags = ["--worker-api-key-file", str(key), "--worker-ca", authority.file, "--worker-cert", cert]
    flags += ["--worker-key", private]
    plan = read_plan(["--worker", "https://h", *flags])
    assert plan.access_flags == flags
    assert plan.access().key == "secret"
    given = load_settings(["--worker", "https://h", *flags], {})
    assert (given.worker_api_key_file, given.worker_ca) == (str(key), authority.file)
    assert (given.worker_cert, given.worker_key) == (cert, private)


def test_no_arms_of_a_live_test_share_a_mode_that_is_compared(tmp_path: Path) -> None:
    """A file of settings may be that of a router that serves."""
    file = tmp_path / "router.yaml"
    file.write_text("ab: kv:90,round-robin:10\nseed: 1")
    plan = read_plan([f"--router-arg=--config={file}"])
    settings = load_settings(["--worker", "http://a:1", *plan.router_flags(7)], {})
    assert (settings.ab, settings.seed) == (None, 7)


def test_a_server_that_is_no_engine(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with engine(resets=True) as (url, _):
        assert main(["--trace", trace, "--modes", "none", "--worker", f"{url}/elsewhere"]) == 2
    assert f"{url}/elsewhere/v1/models lists no model" in capsys.readouterr().err


async def test_a_list_of_models_that_cannot_be_decoded(serve: Serve) -> None:
    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(b"200 OK", b'{"data":[{"id":"\xff"}]}'))
        await writer.drain()

    address = await serve(answer)
    with pytest.raises(RunError, match="lists no model"):
        await served_model([address.url], WorkerAccess())


def test_help_names_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "synthetic:agent" in capsys.readouterr().out


def test_defaults() -> None:
    plan = read_plan([])
    assert (plan.modes, plan.baseline, plan.speedup) == (("kv", "round-robin"), "round-robin", 4.0)
    assert read_plan(["--worker", "http://h:1,block_size=32"]).speedup == 1.0


@pytest.mark.parametrize(
    ("modes", "labels", "baseline"),
    [
        ("kv,random", ("kv", "random"), "random"),
        ("random, kv", ("random", "kv"), "random"),
        ("kv,kv,kv", ("kv", "kv#2", "kv#3"), "kv"),
    ],
)
def test_modes(modes: str, labels: tuple[str, ...], baseline: str) -> None:
    plan = read_plan(["--modes", modes])
    assert (plan.modes, plan.baseline) == (labels, baseline)
    assert all(mode_of(label) in MODES for label in labels)


def test_every_routed_mode_but_direct_can_be_run() -> None:
    routed = set(RouterMode.__args__)  # type: ignore[attr-defined]
    assert set(MODES) == routed - {"direct"} | {"none"}


def test_the_routers_first_line() -> None:
    assert read_listening("Listening on http://127.0.0.1:4321\n") == "http://127.0.0.1:4321"
    assert read_listening("something else\n") == ""


def test_a_label_is_checked_before_anything_starts() -> None:
    with pytest.raises(RunError):
        read_plan(["--modes", ""])
