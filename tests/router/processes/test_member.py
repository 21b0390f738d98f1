"""What processes on one port tell each other."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from router.cli import load_settings
from router.processes import member
from router.processes.member import Member, Sockets, Start, memory_size, read_start, share
from router.scheduling.figures import BACKLOG_ROWS, LOAD_ROWS
from router.settings import Settings


async def mine() -> bytes:
    return b"mine"


def test_what_processes_share_of_load_and_of_backlog_lies_apart(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as memory:
        memory.truncate(memory_size(2, 8))
        shared = share(Member(0, 2, 8, memory.fileno(), str(tmp_path)))
        shared.load.tables[:] = 1
        assert not shared.backlog.tables.any()
        assert (shared.load.tables.shape, shared.backlog.tables.shape) == ((2, LOAD_ROWS, 9), (2, BACKLOG_ROWS, 9))


async def test_a_process_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is its connection kept: a process that stands still may do so for long."""
    monkeypatch.setattr(member, "ANSWER_TIMEOUT", 0.01)
    left = asyncio.Event()

    async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        left.set()
        writer.close()

    async with await asyncio.start_unix_server(stand_still, tmp_path / "1"):
        sockets = Sockets(Member(0, 2, 0, -1, str(tmp_path)), mine)
        assert await sockets.metrics_of_all() == {0: b"mine"}
        await asyncio.wait_for(left.wait(), 30.0)


async def test_half_a_page_of_a_process_that_ends_is_left_out(tmp_path: Path) -> None:
    """Whoever reads the page of all would refuse all of it for half a line, or take half a number for a whole one."""

    async def end_in_the_middle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"router_retries_total 1")  # of 12, say
        writer.close()

    async with await asyncio.start_unix_server(end_in_the_middle, tmp_path / "1"):
        sockets = Sockets(Member(0, 2, 0, -1, str(tmp_path)), mine)
        assert await sockets.metrics_of_all() == {0: b"mine"}


async def test_each_process_has_the_pages_of_all(tmp_path: Path) -> None:
    both = [Sockets(Member(number, 2, 0, -1, str(tmp_path)), mine) for number in range(2)]
    for sockets in both:
        await sockets.start()
    assert [await sockets.metrics_of_all() for sockets in both] == [{0: b"mine", 1: b"mine"}] * 2
    for sockets in both:
        sockets.close()


PRINTING = """
import sys
import router.serve
from router.processes import member

def run(settings, source, own):
    print("printed by a policy")
    member.Sockets(own, None).tell("Listening")
    return 0

router.serve.run = run
sys.exit(member.main())
"""


def test_what_a_process_prints_is_not_for_its_parent() -> None:
    """Who reads but the line that it listens: a pipe that is full would make it stand still."""
    start = Start(Settings(), Member(0, 2, 8, -1, "/none"), [], 0, "local")
    command = [sys.executable, "-c", PRINTING]
    ended = subprocess.run(command, input=start.line(), capture_output=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == (b"Listening\n", b"printed by a policy\n")


def test_a_process_is_told_all_settings_as_they_are() -> None:
    """Also the name of a file that is no UTF-8, as in an older locale."""
    argv = ["--worker", "http://10.0.0.1:8000,role=prefill,name=one", "--api-keys", "/etc/schl\udcfcssel.yaml"]
    argv += ["--model-folder", "/models", "--store", "http://10.0.0.5:9003", "--admin-listen", "127.0.0.1:9090"]
    start = Start(load_settings(argv, {}), Member(1, 2, 4096, 3, "/tmp/one"), argv, 0, "local")
    assert read_start(start.line()) == start
