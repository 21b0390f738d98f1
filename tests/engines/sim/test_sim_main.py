"""The command line: flags to settings, the ready line, the ending."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from dataclasses import fields

import aiohttp
import pytest
import zmq

from engines.sim.__main__ import main
from engines.sim.fleet import make_context
from engines.sim.process import make_parser, read_settings
from engines.sim.settings import SimSettings
from engines.sim.timing import HELP, StepTiming


def parsed(*argv: str) -> SimSettings:
    return read_settings(make_parser().parse_args(argv))


def test_defaults_are_those_of_the_settings() -> None:
    assert parsed("--port", "0") == SimSettings(slow={}, roles={})


def test_flags() -> None:
    line = """--workers 3 --port 0 --flavour sglang --model m --lora a --lora b --block-size 32 --cache-tokens 4096
        --speedup 2.5 --max-num-seqs 9 --max-num-batched-tokens 512 --dp-size 2 --max-model-len 1000 --no-kv-events
        --slow 0=2 --slow 2=1.5 --seed 7 --base-s 0.5 --role 0=prefill --role 2=decode --connector sglang
        --transfer-gb-s 25 --kv-bytes-per-token 1000 --transfer-base-s 0.25 --lease-s 9"""
    made = parsed(*line.split())
    assert made == SimSettings(
        workers=3,
        flavour="sglang",
        model="m",
        loras=("a", "b"),
        block_size=32,
        cache_tokens=4096,
        speedup=2.5,
        max_num_seqs=9,
        max_num_batched_tokens=512,
        dp_size=2,
        max_model_len=1000,
        kv_events=False,
        slow={0: 2.0, 2: 1.5},
        seed=7,
        roles={0: "prefill", 2: "decode"},
        connector="sglang",
        transfer_gb_s=25.0,
        kv_bytes_per_token=1000,
        transfer_base_s=0.25,
        lease_s=9.0,
        timing=StepTiming(base_s=0.5),
    )


def test_the_version_says_of_what(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        make_parser().parse_args(["--version"])
    assert capsys.readouterr().out.startswith("kv-sim ")


def test_every_timing_constant_has_a_flag() -> None:
    assert set(HELP) == {field.name for field in fields(StepTiming)}


@pytest.mark.parametrize(
    "argv",
    [
        ["--workers", "0"],
        ["--cache-tokens", "8"],
        ["--speedup", "0"],
        ["--speedup", "nan"],
        ["--slow", "0=inf"],
        ["--prefill-tokens-per-s", "0"],
        ["--slow", "8=2"],
        ["--slow", "x"],
        ["--max-num-batched-tokens", "8"],
        ["--role", "0=prefill"],
        ["--role", "0=encode", "--connector", "nixl"],
        ["--role", "8=decode", "--connector", "nixl"],
        ["--connector", "sglang"],
        ["--connector", "nixl", "--flavour", "sglang"],
        ["--connector", "nixl", "--lease-s", "0"],
        ["--connector", "nixl", "--lease-s", "inf"],
        ["--connector", "nixl", "--lease-s", "nan"],
        ["--connector", "nixl", "--transfer-base-s", "inf"],
        ["--connector", "nixl", "--transfer-base-s", "nan"],
        ["--connector", "nixl", "--transfer-gb-s", "nan"],
        ["--connector", "nixl", "--kv-bytes-per-token", "0"],
        ["--tokenizer", "/nonexist", "--port", "0"],
        ["--lora", "sim"],  # the model's name
        ["--lora", "a", "--lora", "a"],
        ["--lora", ""],
        ["--model", ""],
        ["--host", ""],
        ["--worker", "2"],  # half a flag
        ["--port", "-1"],
        ["--port", "70000"],
        ["--port", "64536", "--workers", "1"],  # its events
        ["--port", "65530", "--no-kv-events"],  # the seventh of eight workers
        ["--port", "65030", "--no-kv-events", "--role", "6=prefill", "--connector", "mooncake"],  # its bootstrap server
    ],
)
def test_nonsense_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith("kv-sim: ")
    assert told.endswith("; --help lists every flag")
    assert any(flag in told for flag in argv[::2])


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "64534", "--workers", "1"],
        ["--port", "65528", "--no-kv-events"],
        ["--port", "65030", "--no-kv-events", "--role", "5=prefill", "--connector", "mooncake"],
    ],
)
def test_the_last_ports_may_be_taken(argv: list[str]) -> None:
    assert parsed(*argv).last_port == 65535


@pytest.mark.parametrize(
    ("flag", "value", "form"),
    [("--slow", "1", "INDEX=FACTOR"), ("--role", "0=x", "INDEX=ROLE, the role being prefill or")],
)
def test_what_a_flag_takes_is_told(flag: str, value: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([flag, value])
    assert f"argument {flag}: it takes {form}" in capsys.readouterr().err


def test_what_each_port_is_for() -> None:
    """In the order in which they are looked at: with two fleets on one --port, the second names that port."""
    flags = ["--port", "18000", "--workers", "2", "--role", "1=prefill", "--connector", "mooncake"]
    assert list(parsed(*flags).ports()) == [
        (18000, "worker 0's HTTP"),
        (18001, "worker 1's HTTP"),
        (18501, "worker 1's bootstrap server"),
        (19000, "worker 0's KV events"),
        (19001, "worker 0's KV events"),
        (19002, "worker 1's KV events"),
        (19003, "worker 1's KV events"),
    ]
    assert not list(parsed("--port", "0").ports())


@pytest.mark.parametrize(("offset", "use"), [(0, "worker 0's HTTP"), (1002, "worker 1's KV events")])
def test_a_port_that_is_taken_is_named_with_its_use(offset: int, use: str, capsys: pytest.CaptureFixture[str]) -> None:
    host = "127.0.0.7"  # the other ports are free there, whatever other tests do
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as stopped:
            main(["--workers", "2", "--host", host, "--port", str(port - offset)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        f"kv-sim: port {port} of {host}, for {use}, is taken, perhaps by another kv-sim: give another --port, or 0 for "
        "free ones; --help lists every flag\n"
    )


@pytest.mark.parametrize(
    ("flags", "port", "one", "other"),
    [
        (["--workers", "1001"], 1000, "worker 1000's HTTP", "worker 0's KV events"),
        (
            ["--workers", "501", "--role", "0=prefill", "--connector", "mooncake", "--no-kv-events"],
            500,
            "worker 500's HTTP",
            "worker 0's bootstrap server",
        ),
    ],
)
def test_a_port_that_a_large_fleet_needs_twice_is_named(flags: list[str], port: int, one: str, other: str) -> None:
    with pytest.raises(ValueError, match=f"port {18000 + port} would be for both {one} and {other}: give --port 0"):
        parsed("--port", "18000", *flags)
    assert parsed("--port", "0", *flags).workers > port


def test_each_rank_of_a_large_fleet_has_its_event_sockets() -> None:
    context = make_context(SimSettings(workers=1000, dp_size=2))
    assert context.get(zmq.MAX_SOCKETS) >= 4000
    context.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["-Sn", "-n"])
async def test_a_fleet_takes_more_files_than_are_usually_allowed_or_says_so(limit: str) -> None:
    """20 workers take a hundred. A soft limit is raised; with a hard one nothing can be done."""
    command = [sys.executable, "-m", "engines.sim", "--workers", "20", "--port", "0"]
    limited = ["bash", "-c", f'ulimit {limit} 64 && exec "$@"', "limited", *command]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*limited, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    ready = await process.stdout.readline()
    if process.returncode is None and ready:
        process.terminate()
    _, said = await process.communicate()
    if limit == "-Sn":
        assert len(json.loads(ready)["workers"]) == 20
    else:
        assert said.decode() == (
            "kv-sim: 64 open files are too few for so many workers: raise `ulimit -Hn`; --help lists every flag\n"
        )
        assert process.returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_told_to_stop(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "engines.sim", "--workers", "2", "--port", "0", "--base-s", "60"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        urls = json.loads(await process.stdout.readline())["workers"]
        assert len(set(urls)) == 2
        async with aiohttp.ClientSession() as session:
            response = await session.post(urls[1] + "/v1/completions", json={"prompt": "x", "stream": True})
            process.send_signal(number)
            async with response:
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
        assert await process.wait() == 0
        assert await process.stdout.read() == b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
