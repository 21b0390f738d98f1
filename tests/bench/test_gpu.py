"""Engines that share a GPU: the model that is made for them, how they are started and ended, what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from router.workers.spec import parse_worker
from scripts.bench.gpu.__main__ import main
from scripts.bench.gpu.engines import Engine, fleet
from scripts.bench.gpu.model import SHAPES, VOCABULARY, make_model
from scripts.bench.processes import CannotStart, status

ENGINE = """\
#!{python}
import http.server, json, sys
class Up(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print(json.dumps(sys.argv[1:]), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Up).serve_forever()
"""
"""Says how it was started and is healthy."""
WAITING = """\
#!{python}
import http.server, os, sys, threading
class Up(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/models":
            with open("PIPE", "w") as asked:
                print(os.getpid(), file=asked)
            threading.Event().wait()
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Up).serve_forever()
"""
"""Is healthy, and tells its process id when it is asked for its model, which it never names."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def program(folder: Path, text: str) -> str:
    path = folder / "vllm"
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def engine(command: str, extra: Sequence[str] = ()) -> Engine:
    return Engine(command, Path("models/m"), kv_gigabytes=1.5, memory_share=0.2, extra=extra)


def test_a_token_takes_its_keys_and_values_of_all_layers() -> None:
    # vLLM's own report of Qwen3-1.7B: 12e9 bytes of cache take 104,624 tokens.
    assert 12e9 // SHAPES["qwen3-1.7b"].kv_bytes_per_token // 16 * 16 == 104_624


@pytest.mark.slow
def test_a_model_has_the_size_it_is_named_for_and_a_token_for_every_id(tmp_path: Path) -> None:
    make_model(tmp_path / "m", SHAPES["qwen3-4b"])
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (2560, 36, VOCABULARY)
    assert Tokenizer.from_file(str(tmp_path / "m/tokenizer.json")).get_vocab_size() == VOCABULARY


@pytest.mark.slow
def test_a_fleet_is_named_as_the_router_takes_it_and_ended(tmp_path: Path) -> None:
    with fleet(engine(program(tmp_path, ENGINE), ["--enforce-eager"]), 2) as workers:
        specs = [parse_worker(each) for each in workers]
        assert [status(f"{spec.url}/health") for spec in specs] == [200, 200]
        logs = [(tmp_path / f"kv-router-bench/logs/gpu-engine-{number}.log").read_text() for number in range(2)]
    assert [status(f"{spec.url}/health") for spec in specs] == [0, 0]
    for spec, log in zip(specs, logs, strict=True):
        arguments = json.loads(log.splitlines()[0])
        assert arguments[:2] == ["serve", "models/m"]
        assert arguments[-1] == "--enforce-eager"
        assert arguments[arguments.index("--kv-cache-memory-bytes") + 1] == "1500000000"
        published = json.loads(arguments[arguments.index("--kv-events-config") + 1])
        told = [published[key].replace("*", "127.0.0.1") for key in ("endpoint", "replay_endpoint")]
        assert told == [spec.events, spec.replay]


@pytest.mark.slow
def test_an_engine_that_ends_says_why(tmp_path: Path) -> None:
    broken = program(tmp_path, "#!{python}\nraise SystemExit('no GPU here')\n")
    with pytest.raises(CannotStart, match=r"gpu-engine-0 ended with 1: no GPU here"), fleet(engine(broken), 1):
        pass


@pytest.mark.slow
def test_a_command_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--vllm", str(tmp_path / "nothing"), "--workers", "1"]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / "nothing") in told
    assert "logs are in" in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--modes", "kv,roundrobin"], "there is no mode 'roundrobin'"),
        (["--trace", "nowhere.jsonl"], "cannot read the trace nowhere.jsonl"),
        (["--limits", "5"], "unrecognized arguments: --limits 5"),
        (["--out", "nowhere/gpu.json"], "cannot write nowhere/gpu.json"),
        (["--sim-workers", "2"], "--sim-workers is for a simulated fleet"),
    ],
)
def test_a_flag_of_the_comparison_is_refused_before_an_engine_starts(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--vllm", str(tmp_path / "nothing"), *flags]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("gpu: ")
    assert words in told.err
    assert told.out == ""


@pytest.mark.parametrize("flags", [["--workers", "0"], ["--kv-gigabytes", "0"], ["--memory-share", "x"]])
def test_a_fleet_of_nothing_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*flags, "--modes", "none", "--limit", "1"])
    assert f"argument {flags[0]}: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_comparison_and_then_the_engines(tmp_path: Path, number: signal.Signals) -> None:
    asked = tmp_path / "asked"
    os.mkfifo(asked)
    command = [
        sys.executable,
        "-m",
        "scripts.bench.gpu",
        "--vllm",
        program(tmp_path, WAITING.replace("PIPE", str(asked))),
    ]
    command += ["--workers", "1", "--modes", "none"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        pid = int(asked.read_text())
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert error == "kv-router ab: interrupted; what it had started was ended\n"
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
