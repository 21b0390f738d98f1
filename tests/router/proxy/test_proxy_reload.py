"""The settings' file read again: at SIGHUP, or when it has changed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from router.app import App
from router.cli import Source
from router.reloading import Reloading, read_again
from router.settings import Settings
from router.settings.administration import Address
from router.workers.spec import WorkerSpec
from tests.fakes.raw_client import post
from tests.fakes.scripted_worker import ScriptedWorker, events, held_stream
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running


class File:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = Source(["--config", str(path)], {})

    def say(self, *workers: ScriptedWorker, more: str = "", keys: str = "") -> None:
        """Replaced whole, as ConfigMaps are."""
        listed = "".join(f"  - {worker.url},name={worker.name}{keys}\n" for worker in workers)
        self.put(f"worker:\n{listed}{more}")

    def put(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "router.yaml")


COMMON = "router_mode: round-robin\nport: 0\ntokenizer: engine\nhealth_interval: 60\nconnect_timeout: 60\nseed: 1\n"


def names(app: App) -> list[str]:
    return list(app._fleet.workers)


async def test_a_hangup_adds_and_removes_workers_without_losing_a_request(
    a: ScriptedWorker, b: ScriptedWorker, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    file.say(a, more=COMMON)
    a.then(held_stream)
    b._default = events(b"1", b"[DONE]")
    async with running(a, source=file.source) as router, router.client() as one, router.client() as other:
        one.send(post(body=b'{"prompt":"x","stream":true}'))
        await one.head()
        file.say(b, more=COMMON)
        await router.hang_up()
        await until(lambda: router.is_up(b))
        await until(lambda: router.app._fleet.workers["a"].state == "draining")
        assert (await other.ask(post())).header(b"x-router-worker") == b"b"
        a.go_on.set()
        await one.read_until(b"[DONE]")
        await until(lambda: names(router.app) == ["b"])
        assert "they take a restart" not in caplog.text


async def test_a_hangup_while_the_router_ends_changes_nothing(a: ScriptedWorker, b: ScriptedWorker, file: File) -> None:
    file.say(a, more=COMMON)
    async with running(a, source=file.source) as router:
        pass
    file.say(a, b, more=COMMON)
    await router.hang_up()
    assert names(router.app) == ["a"]


async def test_a_pipe_is_not_read_again(a: ScriptedWorker, caplog: pytest.LogCaptureFixture) -> None:
    """It was read at the start, and looks like an empty file since."""
    end, other = os.pipe()
    os.close(other)
    source = Source(["--config", f"/dev/fd/{end}", "--admin-listen", "127.0.0.1:0"], {})
    async with running(a, source=source) as router:
        await router.hang_up()
        assert "The settings stay as they are" in caplog.text
        assert router.app._fleet.workers["a"].state == "up"
    os.close(end)


async def test_a_hangup_changes_roles_and_says_what_takes_a_restart(
    a: ScriptedWorker, b: ScriptedWorker, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    file.say(a, b, more=COMMON)
    async with running(a, b, source=file.source) as router, router.client() as client:
        file.say(a, b, more=COMMON, keys=",role=decode,connector=nixl")
        await router.hang_up()
        assert (await client.ask(post())).status == 503
        assert "they take a restart" not in caplog.text
        file.say(a, b, more=COMMON + "pd_timeout: 1\n")
        await router.hang_up()
        (told,) = [record for record in caplog.records if "they take a restart" in record.getMessage()]
        assert told.__dict__["fields"] == {"settings": "pd_timeout"}
        assert (await client.ask(post())).status == 200


@pytest.mark.parametrize(
    "text", ["worker: [nonsense]\n", "worker: []\n", "{", "worker: ['http://a:1', 'http://a:1']\n"]
)
async def test_a_broken_file_changes_nothing_and_says_why(
    a: ScriptedWorker, file: File, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file.say(a, more=COMMON)
    async with running(a, source=file.source) as router, router.client() as client:
        file.put(text)
        await router.hang_up()
        (told,) = [record for record in caplog.records if record.getMessage() == "The settings stay as they are"]
        assert str(told.__dict__["fields"]["reason"])
        assert (names(router.app), (await client.ask(post())).status) == (["a"], 200)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("kv_policy: nonsense", "--kv-policy"),
        ("tokenizer: /nowhere", "/nowhere"),
        ("api_keys: /nowhere", "--api-keys"),
        ("tls_client_ca: /nowhere", "--tls-client-ca"),
        ("ab_sticky: x-session", "--ab-sticky"),
    ],
)
async def test_settings_that_a_restart_would_refuse_change_nothing(
    a: ScriptedWorker, b: ScriptedWorker, file: File, caplog: pytest.LogCaptureFixture, changed: str, named: str
) -> None:
    common = COMMON.replace("round-robin", "kv")
    file.say(a, more=common)
    async with running(a, source=file.source, router_mode="kv") as router:
        file.put(f"{file.path.read_text()}  - {b.url}\n".replace(common, "") + common)
        file.say(a, b, more=common.replace("tokenizer: engine\n", "") + changed + "\n")
        await router.hang_up()
        assert names(router.app) == ["a"]
        (reason,) = reasons(caplog)
        assert named in reason
        assert "they take a restart" not in caplog.text


async def test_a_key_that_is_not_a_role_is_taken_in_with_the_next_health_check(a: ScriptedWorker, file: File) -> None:
    file.say(a, more=COMMON)
    async with running(a, source=file.source) as router, router.client() as client:
        worker = router.app._fleet.workers["a"]
        assert worker.block_size == 4
        file.say(a, more=COMMON, keys=",block_size=2")
        asked = a.asked.count("/version")
        await router.hang_up()
        assert router.app._roster
        watch = router.app._roster._watched["a"].watch
        for _ in range(2):
            await watch._round()
        assert a.asked.count("/version") == asked + 1
        assert (worker.state, worker.block_size) == ("up", 2)
        assert (await client.ask(post())).status == 200


async def test_settings_are_read_while_all_else_goes_on_and_one_after_the_other(
    a: ScriptedWorker, b: ScriptedWorker, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of thousands of keys takes long."""
    reads, go_on = list[threading.Thread](), threading.Event()

    def read(source: Source, in_force: Settings) -> tuple[Settings, list[str]]:
        reads.append(threading.current_thread())
        assert go_on.wait(30)
        return read_again(source, in_force)

    monkeypatch.setattr("router.reloading.read_again", read)
    file.say(a, more=COMMON)
    async with running(a, source=file.source) as router, router.client() as client:
        file.say(a, b, more=COMMON)
        for _ in range(5):
            router.app.on_hangup()
        await until(lambda: bool(reads))
        assert (await client.ask(post())).status == 200
        assert (len(reads), names(router.app)) == (1, ["a"])
        go_on.set()
        await until(lambda: names(router.app) == ["a", "b"] and not router.app._reloads)
    assert len(reads) == 2, "one more for all that came meanwhile"
    assert threading.current_thread() not in reads


# -- watching the file


@asynccontextmanager
async def watching(router: RunningRouter, file: File, interval: float = 0.001) -> AsyncIterator[None]:
    assert router.app._roster
    reloading = Reloading(file.source, router.app._settings, router.app._roster, lambda: lambda: None)
    task = asyncio.create_task(reloading.watch(file.path, interval))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record for record in caplog.records if record.getMessage() == "The settings stay as they are"]
    return [str(record.__dict__["fields"]["reason"]) for record in said]


async def test_a_file_that_changes_is_read_again(
    a: ScriptedWorker, b: ScriptedWorker, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    file.say(a, more=COMMON)
    async with running(a) as router, watching(router, file):
        file.say(a, b, more=COMMON)
        await until(lambda: names(router.app) == ["a", "b"])
        file.put("{")
        await until(lambda: len(reasons(caplog)) == 1)
        file.path.unlink()
        await until(lambda: len(reasons(caplog)) == 2)
        file.say(b, more=COMMON)
        await until(lambda: names(router.app) == ["b"])
    assert "not valid YAML" in reasons(caplog)[0]
    assert "cannot be read" in reasons(caplog)[1]


async def test_a_file_that_is_empty_for_a_moment_removes_nobody(
    a: ScriptedWorker, b: ScriptedWorker, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    file.say(a, more=COMMON)
    admin = {"host": "127.0.0.1", "port": 0}
    async with running(a, admin_listen=msgspec.convert(admin, Address)) as router, watching(router, file):
        file.put(" \n")
        await until(lambda: len(reasons(caplog)) == 1)
        assert names(router.app) == ["a"]
        file.say(a, b, more=COMMON)
        await until(lambda: names(router.app) == ["a", "b"])
    assert "is empty" in reasons(caplog)[0]


async def test_a_file_that_is_being_written_is_read_when_it_is_whole(
    a: ScriptedWorker, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it may be valid, and name only some of the workers."""
    marks, looks, read_at = [(1,), (1,), (2,), (3,), (4,), (4,)], [(0,)], list[int]()

    def look(_: Path) -> tuple[int, ...]:
        looks.append(marks[min(len(looks), len(marks)) - 1])
        return looks[-1]

    def read(_: Path) -> bytes:
        read_at.append(len(looks) - 1)
        return b"{}"

    monkeypatch.setattr("router.reloading._mark", look)
    monkeypatch.setattr("router.reloading._content", read)
    file.say(a, more=COMMON)
    async with running(a) as router, watching(router, file):
        await until(lambda: len(looks) > len(marks) + 2)
    assert read_at == [2, 6]


async def test_nothing_is_looked_at_until_the_interval_has_passed(
    a: ScriptedWorker, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    monkeypatch.setattr("router.reloading._mark", looks.append)
    async with running(a) as router, watching(router, file, 3600.0):
        await until(lambda: bool(looks))
        for _ in range(50):  # in each of which it could look again
            await asyncio.to_thread(int)
    assert len(looks) == 1


async def test_a_fault_in_taking_settings_over_does_not_end_the_watching(
    a: ScriptedWorker, b: ScriptedWorker, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(specs: Sequence[WorkerSpec], timeout: float) -> list[str]:
        raise KeyError

    file.say(a, more=COMMON)
    async with running(a) as router, watching(router, file):
        assert router.app._roster
        take = router.app._roster.take
        router.app._roster.take = fail  # type: ignore[method-assign]
        file.say(a, b, more=COMMON)
        await until(lambda: "The settings could not be taken over" in caplog.messages)
        router.app._roster.take = take  # type: ignore[method-assign]
        file.say(b, more=COMMON)
        await until(lambda: names(router.app) == ["b"])


async def test_a_file_that_says_the_same_is_not_read_again(
    a: ScriptedWorker, file: File, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    looks: list[bytes | None] = []

    def look(path: Path) -> bytes | None:
        looks.append(path.read_bytes())
        return looks[-1]

    monkeypatch.setattr("router.reloading._content", look)
    file.say(a, more=COMMON)
    async with running(a) as router, watching(router, file):
        for count in range(1, 4):
            await until(lambda count=count: len(looks) == count)  # type: ignore[misc]
            file.say(a, more=COMMON)
        await until(lambda: len(looks) == 4)
        assert len(set(looks)) == 1
    assert "Settings read again" not in caplog.text


async def test_a_file_that_changed_while_the_router_started_is_read_again(
    a: ScriptedWorker, b: ScriptedWorker, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file.say(a, b, more=COMMON)
    async with running(a) as router, watching(router, file):
        await until(lambda: names(router.app) == ["a", "b"])
    assert caplog.text.count("Settings read again") == 1


async def test_the_switch_makes_the_router_watch_its_file(a: ScriptedWorker, file: File) -> None:
    file.say(a, more=COMMON)
    for switch in (True, False):
        async with running(a, source=file.source, watch_config=switch) as router:
            assert ("config file" in {task.get_name() for task in router.app._tasks}) == switch
