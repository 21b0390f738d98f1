"""The parent of several processes on one port."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from indexer import jit
from router.cli import Source
from router.processes import parent as processes
from router.processes.member import memory_size
from router.processes.parent import _Parent, _reserve, supervise
from router.reloading import follow, read_again
from router.settings import Settings
from tests.fakes.waiting import until


class Child:
    """A process that lives until the test says so."""

    def __init__(self) -> None:
        self.stdin = self.stdout = self
        self.returncode: int | None = None
        self.ended = asyncio.Event()
        self.told = b""

    def write(self, data: bytes) -> None:
        assert data.endswith(b"\n")
        self.told = data

    async def readline(self) -> bytes:
        return b"Listening on http://127.0.0.1:1\n"

    async def wait(self) -> int:
        await self.ended.wait()
        return 0


@contextmanager
def parent_of(settings: Settings, folder: Path, source: Source | None = None) -> Iterator[_Parent]:
    with tempfile.TemporaryFile() as memory, socket.socket() as reserved:
        memory.truncate(memory_size(settings.processes, 8))
        yield _Parent(settings, settings, source or Source([], {}), 8, memory, str(folder), reserved)


def start_in_turn(monkeypatch: pytest.MonkeyPatch, children: Iterable[Child]) -> None:
    left = iter(children)

    async def start(*_: object, **__: Any) -> Child:
        return next(left)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)


@pytest.fixture(autouse=True)
def children_end_at_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_signal", lambda child, _: child.ended.set())


async def test_a_process_that_cannot_be_started_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ended it, such as a lack of memory, may be what forbids the next one for a while."""
    children: list[Child | None] = [Child(), None, Child()]
    left = list(children)

    async def start(*_: object, **__: Any) -> Child:
        child = left.pop(0)
        if child is None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(processes, "RESTART_DELAY", 0.0)
    settings = Settings(processes=1)
    with parent_of(settings, tmp_path) as parent:
        await parent._start(0)
        keeping = asyncio.create_task(parent._keep(0))
        assert children[0]
        children[0].ended.set()
        await until(lambda: keeping.done() or not left)
        assert not keeping.done()
        parent._on_signal()
        await keeping


async def test_a_process_that_is_started_again_has_a_folder_for_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary files are tidied up after some days, while the router runs on."""
    folder = tmp_path / "sockets"
    start_in_turn(monkeypatch, [Child()])
    with parent_of(Settings(processes=1), folder) as parent:
        await parent._start(0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("made", ["open", "link", "somebody's"])
async def test_no_process_starts_with_a_folder_that_somebody_else_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, made: str
) -> None:
    """Where that folder was tidied away, and its name known: others could put there what numba keeps, which is run."""
    folder, child = tmp_path / "sockets", Child()
    if made == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir(0o700)
        folder.chmod(0o777 if made == "open" else 0o700)
    if made == "somebody's":
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    start_in_turn(monkeypatch, [child])
    with parent_of(Settings(processes=1), folder) as parent:
        assert await parent._try_start(0) == ""
    assert not child.told
    (record,) = caplog.records
    assert str(folder) in str(vars(record)["fields"]["reason"])


async def test_a_process_that_is_started_again_is_told_of_the_workers_that_a_watched_file_states_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would look for those that have left, and answer 503 until it has read the file too."""
    file, children = tmp_path / "router.yaml", [Child(), Child()]
    start_in_turn(monkeypatch, children)
    monkeypatch.setattr(processes, "RESTART_DELAY", 0.0)
    source = Source(["--config", str(file), "--watch-config"], {})
    file.write_text("worker: [http://127.0.0.1:1]")
    with parent_of(source.read(), tmp_path, source) as parent:
        await parent._start(0)
        file.write_text("worker: [http://127.0.0.1:2]")
        keeping = asyncio.create_task(parent._keep(0))
        children[0].ended.set()
        await until(lambda: children[1].told)
        parent._on_signal()
        await keeping
    workers = [msgspec.json.decode(child.told)["settings"]["workers"] for child in children]
    assert [[worker["url"] for worker in each] for each in workers] == [
        ["http://127.0.0.1:1"],
        ["http://127.0.0.1:2"],
    ]


def test_a_port_with_connections_that_have_ended_is_taken() -> None:
    """A router that ran alone there was stopped just now, and had closed connections of its clients."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            before.accept()[0].close()
            assert client.recv(1) == b""
    with _reserve("127.0.0.1", port) as reserved:
        assert reserved.getsockname()[1] == port


def test_a_port_on_which_somebody_listens_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other, pytest.raises(OSError, match="in use"):
        _reserve("127.0.0.1", other.getsockname()[1])


async def test_where_nothing_can_be_written_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose file system is read-only, without a volume for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert await supervise(Settings(processes=2, port=0), Source([], {})) == 1
    (told,) = caplog.messages
    assert told.startswith("Cannot start: ")
    assert str(tmp_path) in told


async def test_a_folder_too_long_for_sockets_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert await supervise(Settings(processes=2, port=0), Source([], {})) == 1
    (told,) = caplog.messages
    assert told.startswith(f"Cannot start: {folder}")
    assert "TMPDIR" in told


async def test_a_process_that_starts_while_the_settings_are_read_again_is_told_to_read_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told the workers as they were before."""
    file, told = tmp_path / "router.yaml", list[tuple[Child, int]]()

    class Starting(Child):
        async def readline(self) -> bytes:
            file.write_text("worker: [http://127.0.0.1:2]")
            parent._on_hangup()
            await asyncio.sleep(0)
            assert not told, "it does not listen to that yet"
            return await super().readline()

    child = Starting()

    async def start(*_: object, **__: Any) -> Child:
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(processes, "_signal", lambda *what: told.append(what))
    source = Source(["--config", str(file)], {})
    file.write_text("worker: [http://127.0.0.1:1]")
    with parent_of(source.read(), tmp_path, source) as parent:
        await parent._start(0)
    assert told == [(child, signal.SIGHUP)]


async def test_settings_that_cannot_be_read_again_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, told = tmp_path / "router.yaml", list[tuple[Child, int]]()

    async def start(*_: object, **__: Any) -> Child:
        return Child()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(processes, "_signal", lambda *what: told.append(what))
    source = Source(["--config", str(file)], {})
    file.write_text("worker: [http://127.0.0.1:1]")
    with parent_of(source.read(), tmp_path, source) as parent:
        await parent._start(0)
        file.write_text("worker: [")
        parent._on_hangup()
        await asyncio.sleep(0)
        assert caplog.messages == ["The settings stay as they are"]
        assert not told
        file.write_text("worker: [http://127.0.0.1:2]")
        parent._on_hangup()
        await asyncio.sleep(0)
    assert [number for _, number in told] == [signal.SIGHUP]


async def test_hangups_that_come_while_the_settings_are_read_count_once_and_a_signal_to_stop_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of keys each took seconds, one after the other, before anything else was done."""
    reads: list[bool] = []

    def read(source: Source, in_force: Settings) -> tuple[Settings, list[str]]:
        reads.append(parent._stopping.is_set())
        if len(reads) == 1:
            for _ in range(3):
                parent._on_hangup()
        return read_again(source, in_force)

    monkeypatch.setattr(processes, "read_again", read)
    with parent_of(Settings(), tmp_path) as parent:
        parent._on_hangup()
        await until(lambda: len(reads) == 2)
        parent._on_hangup()
        parent._on_signal()
        await asyncio.sleep(0)
    assert reads == [False, False]


@pytest.mark.parametrize("refused", ["worker: [", "worker: [http://127.0.0.1:3]\ntokenizer: /none"])
async def test_where_settings_are_refused_a_process_that_is_started_again_has_the_workers_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Also those that a watched file stated before it was spoilt, which only the parent can tell."""
    file, children = tmp_path / "router.yaml", [Child(), Child()]
    start_in_turn(monkeypatch, children)
    monkeypatch.setattr(processes, "RESTART_DELAY", 0.0)
    monkeypatch.setattr(processes, "follow", partial(follow, interval=0.001))
    source = Source(["--config", str(file), "--watch-config"], {})
    file.write_text("worker: [http://127.0.0.1:1]")
    with parent_of(source.read(), tmp_path, source) as parent:
        serving = asyncio.create_task(parent.run())
        await until(lambda: parent._listening)
        file.write_text("worker: [http://127.0.0.1:22]")
        await until(lambda: parent._settings.workers[0].url.endswith(":22"))
        file.write_text(refused)
        children[0].ended.set()
        await until(lambda: children[1].told)
        parent._on_signal()
        assert await serving == 0
    (worker,) = msgspec.json.decode(children[1].told)["settings"]["workers"]
    assert worker["url"] == "http://127.0.0.1:22"


async def test_a_process_that_is_being_started_when_the_signal_comes_is_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, told = Child(), list[tuple[Child, int]]()

    async def start(*_: object, **__: Any) -> Child:
        parent._on_signal()
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(processes, "_signal", lambda *what: told.append(what))
    settings = Settings(processes=1)
    with parent_of(settings, tmp_path) as parent:
        await parent._start(0)
    assert told == [(child, signal.SIGTERM)]


async def test_a_signal_while_processes_start_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Child):
        """As a process that has no handler for the signal yet."""

        async def readline(self) -> bytes:
            parent._on_signal()
            return b""

        async def wait(self) -> int:
            return -15

    async def start(*_: object, **__: Any) -> Child:
        return Killed()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with parent_of(Settings(processes=2), tmp_path) as parent:
        assert await parent.run() == 0


@pytest.mark.parametrize(("status", "told"), [(-9, True), (0, True), (1, False), (2, False)])
async def test_a_process_that_ends_before_it_listens_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int, told: bool
) -> None:
    """One that was killed, as where memory is short, has told nothing itself."""

    class Ended(Child):
        async def readline(self) -> bytes:
            return b""

        async def wait(self) -> int:
            return status

    start_in_turn(monkeypatch, [Child(), Ended()])
    with parent_of(Settings(processes=2), tmp_path) as parent:
        assert await parent.run() == max(status, 1)
    assert caplog.messages == ["A process ended before it listened"] * told


@pytest.mark.parametrize("refused", [0, 1, 2])
async def test_where_the_system_refuses_a_process_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: int
) -> None:
    children: list[Child] = []

    async def start(*_: object, **__: Any) -> Child:
        if len(children) == refused:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        children.append(Child())
        return children[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with parent_of(Settings(processes=refused + 1), tmp_path) as parent:
        assert await parent.run() == 1
    assert caplog.messages == ["A process cannot be started"]
    assert all(child.ended.is_set() for child in children)


async def test_a_signal_while_others_start_lets_those_that_serve_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal would end them at once."""
    told: list[Child] = []

    class Starting(Child):
        async def readline(self) -> bytes:
            parent._on_signal()
            return b""

    def heed(child: Child, _: int) -> None:
        told.append(child)
        child.ended.set()

    children = [Child(), Starting()]
    start_in_turn(monkeypatch, children)
    monkeypatch.setattr(processes, "_signal", heed)
    with parent_of(Settings(processes=2), tmp_path) as parent:
        assert await parent.run() == 0
    assert told == children


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_process_that_stands_still_is_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, signals: int
) -> None:
    def heed(child: Child, number: int) -> None:
        if number == signal.SIGKILL:
            child.ended.set()

    async def start(*_: object, **__: Any) -> Child:
        return Child()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(processes, "_signal", heed)
    monkeypatch.setattr(processes, "GRACE", 0.0)
    settings = Settings(processes=1, drain_timeout=0.0 if signals == 1 else 3600.0)
    with parent_of(settings, tmp_path) as parent:
        await parent._start(0)
        keeping = asyncio.create_task(parent._keep(0))
        for _ in range(signals):
            parent._on_signal()
        async with asyncio.timeout(30):
            await keeping
    assert "A process does not end and is killed" in caplog.messages


async def test_a_process_that_stands_still_while_it_serves_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel goes on giving connections to it."""
    started: list[Child] = []

    def heed(child: Child, number: int) -> None:
        assert number == signal.SIGKILL or len(started) > 1
        child.ended.set()

    async def start(*_: object, **__: Any) -> Child:
        started.append(Child())
        if len(started) > 1:
            parent._on_signal()
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(processes, "_signal", heed)
    monkeypatch.setattr(processes, "INTERVAL", 0.0)
    monkeypatch.setattr(processes, "RESTART_DELAY", 0.0)
    settings = Settings(processes=1)
    with parent_of(settings, tmp_path) as parent:
        async with asyncio.timeout(30):
            assert await parent.run() == 0
    assert "A process stands still and is killed" in caplog.messages
    assert len(started) == 2


@pytest.mark.parametrize("kept", [True, False])
async def test_what_one_process_compiles_is_there_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """On a file system that cannot be written to, each would take half a minute, one after the other."""
    folders = []

    async def start(*_: object, env: Mapping[str, str], **__: Any) -> Child:
        folders.append(env.get("NUMBA_CACHE_DIR"))
        return Child()

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(jit, "_not_kept", [] if kept else ["kernel"])
    with parent_of(Settings(processes=1), tmp_path) as parent:
        await parent._start(0)
    assert folders == [None if kept else str(tmp_path)]
