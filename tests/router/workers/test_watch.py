"""A worker comes up, goes down and comes back, and the fleet hears of it each time."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import aiohttp
import msgspec
import pytest

from engines import problems
from engines.vllm import sleep
from publishers.reasons import reason_of
from publishers.turns import EARLY
from router.http.pool import IDLE_LIFE, Pool
from router.http.upstream import KnownHeads, WorkerConnection
from router.scheduling.places import NoPlace
from router.workers.fleet import Fleet
from router.workers.spec import parse_worker
from router.workers.watch import _MODELS_EVERY, ASLEEP, WorkerWatch, _addresses
from router.workers.worker import Worker
from tests.certificates import Authority
from tests.fakes.http_engine import HttpEngine, models, running
from tests.fakes.waiting import until
from tests.router.http.test_front import FakeTransport
from tests.router.http.test_pool import answer_over

INTERVAL = 0.005


class Watched:
    """One watch over one worker; `described` holds what it was each time it came up."""

    def __init__(self, url: str, session: aiohttp.ClientSession, interval: float) -> None:
        spec = parse_worker(f"{url},name=w")
        self.worker = Worker(spec, Pool(spec.url, 1.0))
        self.fleet = Fleet([self.worker])
        self.described: list[list[str]] = []
        self.failing: Exception | None = None
        self.taking_in = asyncio.Event()
        """Until it is set, taking the worker in lasts."""
        self.taking_in.set()
        self.watch = WorkerWatch(self.worker, self.fleet, session, interval, self._on_described)

    async def _on_described(self, worker: Worker) -> None:
        assert not worker.up or self.described, "taken in before it serves"
        self.described.append([model.id for model in worker.models])
        await self.taking_in.wait()
        if self.failing:
            raise self.failing

    @property
    def trouble(self) -> str:
        return self.worker.trouble


@asynccontextmanager
async def watching(url: str, session: aiohttp.ClientSession | None = None) -> AsyncIterator[Watched]:
    async with aiohttp.ClientSession() as own:
        # Over real sockets the interval, which is a check's time limit too, leaves room for a busy machine.
        watched = Watched(url, session or own, INTERVAL if session else 1.0)
        task = asyncio.create_task(watched.watch.run())
        try:
            yield watched
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def told(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, object]]:
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == message]


# -- over real sockets


async def test_a_worker_comes_up_as_it_describes_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(HttpEngine({"/v1/models": models("m", "n")})) as engine, watching(engine.url) as watched:
        await watched.watch.first_check.wait()
        assert watched.worker.up
        assert watched.described == [["m", "n"]]
        assert [rank.worker_id for rank in watched.fleet.candidates("n").ranks] == ["w"]
    (up,) = told(caplog, "Worker is up")
    assert (up["worker"], up["engine"], up["models"]) == ("w", "vllm", "m,n")
    (problem,) = told(caplog, problems.NO_EVENT_SOURCES)
    assert problem == {"worker": "w"}


@pytest.mark.parametrize(
    ("stated", "told_of"),
    [
        ("", False),
        (",role=prefill", True),
        (",role=decode", False),
        (",role=prefill,connector=mooncake,bootstrap_port=1", True),
    ],
)
async def test_one_that_prefills_and_cannot_hand_over_says_so(
    stated: str, told_of: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session = ScriptedSession([WELL])
    async with watching(f"http://w:80{stated}", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
    assert any(message.startswith("The worker cannot hand over: ") for message in caplog.messages) == told_of


@pytest.mark.parametrize(
    ("addresses", "told_of"),
    [
        (["127.0.0.1"], None),
        (["127.0.0.1", "127.0.0.1"], None),
        (["127.0.0.1", "::1"], None),
        (["127.0.0.1", "127.0.0.2", "::1"], 2),
    ],
)
async def test_a_name_with_several_addresses_is_a_problem(
    addresses: list[str], told_of: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(host: str, port: int | None, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, 1, 6, "", (each, port)) for each in addresses]

    async with running(HttpEngine()) as engine:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
        async with watching(engine.url.replace("127.0.0.1", "engines.test")) as watched:
            await watched.watch.first_check.wait()
            assert watched.worker.up
            several = [problem for problem in watched.worker.problems if "addresses" in problem]
    assert several == ([problems.several_addresses("engines.test", told_of)] if told_of else [])


async def test_a_name_that_leads_nowhere_is_no_problem_of_that_kind() -> None:
    assert await _addresses("") == await _addresses("a..b") == 0


async def test_a_worker_that_is_not_there_is_told_once_and_does_not_end_the_watch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watching("http://127.0.0.1:9") as watched:
        await watched.watch.first_check.wait()
        assert (watched.worker.up, watched.trouble) == (False, "cannot be reached: Connection refused")
        await watched.watch._round()
    assert told(caplog, "Worker is not up") == [{"worker": "w", "trouble": "cannot be reached: Connection refused"}]


async def test_a_worker_that_speaks_no_tls_says_so() -> None:
    async with running(HttpEngine()) as engine, watching(engine.url.replace("http:", "https:")) as watched:
        await watched.watch.first_check.wait()
        assert watched.trouble == "cannot be reached: TLS failed (wrong version number); it may speak plain http"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL", "what it answers is no HTTP"),  # ZMQ's port
        (b"\x15\3\1\0\2\2\x46", "what it answers is no HTTP"),  # TLS
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000, "what it answers is no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", "its answer could not be read whole"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nx", "its answer could not be read whole"),
        (b"", "it closed the connection without an answer"),
    ],
)
async def test_what_is_no_answer_is_told_in_words(said: bytes, reason: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, watching(f"http://127.0.0.1:{port}") as watched:
        await watched.watch.first_check.wait()
        assert watched.trouble == f"cannot be reached: {reason}"


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.7', 8000)"), "Connection refused"),
        (
            aiohttp.ClientConnectionResetError("Cannot write to closing transport"),
            "it closed the connection without an answer",
        ),
        (None, "ClientConnectionError"),
    ],
)
def test_a_reason_has_no_address(cause: Exception | None, reason: str) -> None:
    error = aiohttp.ClientConnectionError("10.0.0.7:8000")
    error.__cause__ = cause
    assert reason_of(error) == reason


def test_a_reason_is_not_how_a_timeout_came_about() -> None:
    error = TimeoutError()
    error.__cause__ = asyncio.CancelledError()
    assert reason_of(error) == "it did not answer in time"


async def test_a_certificate_that_is_not_trusted_says_so(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(*authority.pair("127.0.0.1"))
    async with running(HttpEngine(tls=served)) as engine, watching(engine.url) as watched:
        await watched.watch.first_check.wait()
        reason = "its certificate is not trusted (unable to get local issuer certificate); see --worker-ca"
        assert watched.trouble == f"cannot be reached: {reason}"


async def test_connections_that_a_rush_left_are_closed_at_a_check() -> None:
    now, transport = 0.0, FakeTransport()
    async with running(HttpEngine({})) as engine, watching(engine.url) as watched:
        watched.worker.pool = pool = Pool(engine.url, 1.0, clock=lambda: now)
        connection = WorkerConnection(KnownHeads(), pool._give_back, pool._discard)
        connection.connection_made(transport)
        answer_over(connection)
        now = IDLE_LIFE
        await watched.watch.first_check.wait()
    assert transport.aborted


async def test_a_worker_that_stops_is_down(caplog: pytest.LogCaptureFixture) -> None:
    async with running(HttpEngine({"/v1/models": models("m")})) as engine, watching(engine.url) as watched:
        await until(lambda: watched.worker.up)
        await engine.stop()
        await until(lambda: not watched.worker.up)
        trouble = watched.trouble
        assert trouble.startswith("cannot be reached: ")
        assert len(watched.fleet.candidates(None)) == 0
    assert told(caplog, "Worker is down")[0]["worker"] == "w"


async def test_a_bad_status_counts_at_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = HttpEngine({"/v1/models": models("m")})
    async with running(engine), watching(engine.url) as watched:
        await until(lambda: watched.worker.up)
        engine.answers["/health"] = (503, b"")
        await until(lambda: not watched.worker.up)
        assert watched.trouble == "/health answered 503"
        engine.answers["/health"] = (200, b"")
        await until(lambda: watched.worker.up)
        assert watched.trouble == ""
        assert len(watched.described) == 2
    assert told(caplog, "Worker is down") == [{"worker": "w", "trouble": "/health answered 503"}]


async def test_what_has_no_health_is_told_to_be_no_engine() -> None:
    """A port beside the engine's, say, or a proxy in front."""
    engine = HttpEngine({})
    engine.answers["/health"] = (404, b"")
    async with running(engine), watching(engine.url) as watched:
        await watched.watch.first_check.wait()
        assert watched.trouble == "/health answered 404, as no engine does: is the URL right?"


# -- scripted, answer by answer

SLOW, REFUSED, WELL, BAD, UNFORESEEN = "slow", "refused", "well", "bad", "unforeseen"
DETAILS = {"/v1/models": models("m")}


class ScriptedSession:
    """Answers /health as scripted, then always the last way; keeps what the worker was at each check."""

    def __init__(self, script: list[str], details: Mapping[str, tuple[int, bytes]] = DETAILS) -> None:
        self.script = script
        self.details = dict(details)
        self.late: dict[str, int] = {}
        """How many times a path is not answered in time, at first."""
        self.broken = set[str]()
        """Paths whose connection breaks the first time."""
        self.asked: Counter[str] = Counter()
        self.checks = 0
        self.seen: list[bool] = []
        self.can_hand_over: list[bool] = []
        self.watched: Watched | None = None

    @asynccontextmanager
    async def get(self, url: str, **_: object) -> AsyncIterator[_Response]:
        path = "/" + url.split("/", 3)[3]
        if path != "/health":
            self.asked[path] += 1
            if self.asked[path] <= self.late.get(path, 0):
                raise TimeoutError
            if path not in self.details or (path in self.broken and self.asked[path] == 1):
                raise aiohttp.ServerDisconnectedError
            yield _Response(*self.details[path])
            return
        if self.watched:
            self.seen.append(self.watched.worker.up)
            self.can_hand_over.append(bool(self.watched.worker.engine_ids))
        step = self.script[min(self.checks, len(self.script) - 1)]
        self.checks += 1
        if step == SLOW:
            raise TimeoutError
        if step == REFUSED:
            raise aiohttp.ClientConnectionError
        if step == UNFORESEEN:
            raise RuntimeError("of whatever kind")
        yield _Response(503 if step == BAD else 200, b"")


class _Response:
    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.content = self
        self._body = body

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self._body


async def seen(*script: str) -> list[bool]:
    """Whether the worker was up when each check began, and after the last."""
    session = ScriptedSession(list(script))
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        session.watched = watched
        await until(lambda: session.checks > len(script))
    return session.seen[1 : len(script) + 1]


@pytest.mark.parametrize(
    ("script", "up"),
    [
        ([WELL, SLOW, SLOW, WELL], [1, 1, 1, 1]),
        ([WELL, SLOW, SLOW, SLOW], [1, 1, 1, 0]),
        ([WELL, SLOW, SLOW, WELL, SLOW, SLOW, WELL], [1, 1, 1, 1, 1, 1, 1]),
        ([WELL, SLOW, SLOW, WELL, SLOW, SLOW, SLOW, SLOW], [1, 1, 1, 1, 1, 1, 0, 0]),
        ([SLOW, SLOW, WELL], [0, 0, 1]),
        ([WELL, REFUSED, WELL], [1, 0, 1]),
        ([WELL, BAD, WELL], [1, 0, 1]),
        ([SLOW, SLOW, BAD, WELL, SLOW, WELL], [0, 0, 0, 1, 1, 1]),
        ([WELL, SLOW, SLOW, SLOW, WELL, SLOW, SLOW, WELL], [1, 1, 1, 0, 1, 1, 1, 1]),
    ],
)
async def test_a_busy_worker_may_be_late_twice(script: list[str], up: list[int]) -> None:
    assert await seen(*script) == [bool(each) for each in up]


@pytest.mark.parametrize(("late", "known"), [(2, True), (3, False)])
async def test_its_bootstrap_server_may_be_late_twice(late: int, known: bool) -> None:
    """Else a worker that is busy for a moment would get nothing to prefill until the next check."""
    session = ScriptedSession([WELL], {**DETAILS, "/query": (200, b'{"0":{"engine_id":"e"}}')})
    url = "http://w:80,role=prefill,connector=mooncake"
    async with watching(url, cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        session.watched = watched
        last = session.late["/query"] = session.asked["/query"] + late
        await until(lambda: session.asked["/query"] > last + 1)
        assert all(session.can_hand_over) == known
        assert session.can_hand_over[-1]


async def test_of_one_that_was_down_no_engine_ids_are_believed_until_it_tells_them_anew() -> None:
    """It may have restarted, and its bootstrap server may be late."""
    session = ScriptedSession([WELL], {**DETAILS, "/query": (200, b'{"0":{"engine_id":"e"}}')})
    url = "http://w:80,role=prefill,connector=mooncake"
    async with watching(url, cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        session.script = [REFUSED]
        await until(lambda: not watched.worker.up)
        session.late["/query"] = session.asked["/query"] + 1
        session.watched, session.script = watched, [WELL]
        await until(lambda: watched.worker.up and watched.worker.engine_ids)
    assert not all(session.can_hand_over)


@pytest.mark.parametrize("stated", ["role=prefill,connector=nixl", "role=decode,connector=mooncake"])
async def test_only_those_that_prefill_by_mooncake_are_asked_for_their_engine_ids(stated: str) -> None:
    session = ScriptedSession([WELL])
    async with watching(f"http://w:80,{stated}", cast("aiohttp.ClientSession", session)):
        await until(lambda: session.checks > 2)
    assert session.asked["/query"] == 0


async def test_a_worker_that_never_answers_in_time_says_so() -> None:
    session = cast("aiohttp.ClientSession", ScriptedSession([SLOW]))
    async with watching("http://w:80", session) as watched:
        await watched.watch.first_check.wait()
        assert watched.trouble == f"/health did not answer within {INTERVAL:g} s"


async def test_each_trouble_is_told_once_until_it_is_well(caplog: pytest.LogCaptureFixture) -> None:
    session = ScriptedSession([REFUSED, REFUSED, BAD, REFUSED, BAD, WELL, BAD, REFUSED, BAD])
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: session.checks > len(session.script))
        assert watched.trouble == "/health answered 503"
    refused, bad = "cannot be reached: ClientConnectionError", "/health answered 503"
    assert [each["trouble"] for each in told(caplog, "Worker is not up")] == [refused, bad, refused]
    assert [each["trouble"] for each in told(caplog, "Worker is down")] == [bad]


async def test_one_that_a_request_found_down_is_taken_back_and_asked_anew() -> None:
    session = ScriptedSession([WELL])
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        watched.fleet.mark_down(watched.worker, "refused a request")
        session.details["/v1/models"] = models("other")
        await until(lambda: watched.worker.up)
        assert watched.described == [["m"], ["other"]]


async def test_what_a_request_found_wrong_is_not_told_again_by_the_next_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = ScriptedSession([WELL])
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        session.script, before = [REFUSED], session.checks
        watched.fleet.mark_down(watched.worker, "cannot be reached: ClientConnectionError")
        await until(lambda: session.checks > before + 2)
    assert caplog.messages.count("Worker is down") == 1
    assert "Worker is not up" not in caplog.messages


async def test_one_that_is_down_is_not_asked_for_its_models() -> None:
    """Whoever it is that answers; it would not count as down until then, either."""
    session = ScriptedSession([WELL, REFUSED])
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: session.checks > 2 * _MODELS_EVERY + 1)
        assert not watched.worker.up
    assert session.asked["/v1/models"] == 1


async def test_one_that_comes_back_is_asked_anew() -> None:
    session = ScriptedSession([WELL, REFUSED])
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: session.checks > 2)
        assert (watched.worker.up, watched.described) == (False, [["m"]])
        session.details["/v1/models"] = models("other")
        session.script = [WELL]
        await until(lambda: watched.worker.up)
        assert watched.described == [["m"], ["other"]]
        assert len(watched.fleet.candidates("m")) == 0
        assert len(watched.fleet.candidates("other")) == 1


def listed(*adapters: str, base: str = "m") -> tuple[int, bytes]:
    (_, body), rest = models(base), [models(name, parent=base)[1] for name in adapters]
    data = [entry for each in (body, *rest) for entry in msgspec.json.decode(each)["data"]]
    return 200, msgspec.json.encode({"data": data})


async def test_adapters_come_and_go_while_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    session = ScriptedSession([WELL], {"/v1/models": listed("a")})
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        assert len(watched.fleet.candidates("b")) == 0
        session.details["/v1/models"] = listed("b")
        await until(lambda: len(watched.fleet.candidates("b")) == 1)
        assert not watched.fleet.knows("a")
        for no_news in (listed("b"), (401, b""), (200, b'{"data": []}'), (500, listed("c")[1])):
            session.details["/v1/models"] = no_news
            before = session.checks
            await until(lambda: session.checks > before + 10)  # noqa: B023 -- awaited at once
        assert watched.fleet.knows("b")
        assert len(watched.described) == 1, "it was not taken in again"
    assert told(caplog, "Worker serves other adapters") == [{"worker": "w", "models": "m,b"}]


async def test_models_are_asked_for_less_often_than_health() -> None:
    session = ScriptedSession([WELL])
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)):
        await until(lambda: session.checks > 3 * _MODELS_EVERY)
    assert session.asked["/v1/models"] <= 1 + session.checks // _MODELS_EVERY


async def test_another_base_model_is_another_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    session = ScriptedSession([WELL], {"/v1/models": listed("a")})
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        session.details["/v1/models"] = listed(base="other")
        await until(lambda: len(watched.described) > 1)
        assert watched.described == [["m", "a"], ["other"]]
    assert "Worker serves other adapters" not in caplog.messages


async def test_requests_go_by_what_an_engine_is_while_it_is_taken_in_again() -> None:
    """Its books are those of what it is now, and learning its tokens may take long."""
    session = ScriptedSession([WELL], {"/v1/models": listed("a")})
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        assert len(watched.fleet.candidates("a")) == 1
        watched.taking_in.clear()
        session.details["/v1/models"] = listed(base="other")
        await until(lambda: len(watched.described) > 1)
        assert (len(watched.fleet.candidates("a")), len(watched.fleet.candidates("other"))) == (0, 1)
        watched.taking_in.set()


async def test_one_broken_connection_leaves_no_worker_half_known() -> None:
    """It would be for as long as it is up."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@"}
    session = ScriptedSession([WELL], {**DETAILS, "/kv_event_sources": (200, msgspec.json.encode({"0": config}))})
    session.broken = {"/kv_event_sources"}
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        assert watched.worker.has_events


async def test_a_failure_to_take_it_in_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    session = ScriptedSession([WELL])
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        watched.failing = ValueError("of whatever kind")
        await until(lambda: len(watched.described) > 1)
        assert not watched.worker.up
        assert watched.trouble == "could not be taken in: ValueError"
        watched.failing = None
        await until(lambda: watched.worker.up)
    assert told(caplog, "A worker could not be taken in")[0] == {"worker": "w"}


async def test_where_there_are_too_many_for_several_processes_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Every check would log it, with a traceback that tells an operator nothing, in each process."""
    session = ScriptedSession([WELL])
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        watched.failing = NoPlace("there are more than the 2 that --processes can share")
        await until(lambda: len(watched.described) > 2)
        assert watched.trouble == "could not be taken in: there are more than the 2 that --processes can share"
    assert caplog.messages == ["Worker is not up"]


async def test_what_nobody_thought_of_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    session = ScriptedSession([WELL, UNFORESEEN, REFUSED, UNFORESEEN, WELL])
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        session.watched = watched
        await until(lambda: session.checks > len(session.script))
    assert session.seen[: len(session.script) + 1] == [False, True, True, False, False, True]
    assert told(caplog, "A worker could not be looked at") == [{"worker": "w"}] * 2


async def test_one_that_does_not_answer_what_it_is_does_not_serve_yet() -> None:
    session = ScriptedSession([WELL], {})
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: session.checks > 2)
        assert (watched.worker.up, watched.trouble) == (False, "answers /health, but not what it is")
        session.details.update(DETAILS)
        await until(lambda: watched.worker.up)
        assert watched.described == [["m"]]


VLLM = {
    **DETAILS,
    "/version": (200, b'{"version": "0.33.0"}'),
    "/kv_event_sources": (200, b"{}"),
    "/metrics": (200, b'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="8"} 1\n'),
}


async def test_what_it_does_not_tell_in_time_is_asked_again_before_it_serves() -> None:
    """As an engine that is busy: it would count as one that has no events, or blocks of another size, for as long as it
    is up."""
    session = ScriptedSession([WELL], VLLM)
    session.late = {"/metrics": 2}
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await watched.watch.first_check.wait()
        assert (watched.worker.up, watched.trouble) == (False, "answers /health, but not in time what it is")
        await until(lambda: watched.worker.up)
        assert watched.worker.block_size == 32
        assert problems.LATE not in watched.worker.problems


async def test_one_that_is_up_goes_on_as_it_was_known_until_it_tells_all() -> None:
    session = ScriptedSession([WELL], VLLM)
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        session.late = {"/metrics": session.asked["/metrics"] + 2}
        session.watched = watched
        watched.watch.stale = True  # as after a reload
        await until(lambda: len(watched.described) > 1)
        assert all(session.seen)
        assert (watched.described[1], watched.worker.block_size) == (["m"], 32)


async def test_one_that_never_tells_all_serves_with_what_it_tells() -> None:
    session = ScriptedSession([WELL], VLLM)
    session.late = {"/metrics": 1000}
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        assert session.checks == 3
        assert problems.LATE in watched.worker.problems


async def test_one_that_never_told_all_is_waited_for_again_when_it_comes_back() -> None:
    session = ScriptedSession([WELL], VLLM)
    session.late = {"/metrics": 1000}
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        session.script = [REFUSED]
        await until(lambda: not watched.worker.up)
        session.late = {"/metrics": session.asked["/metrics"] + 1}
        session.script = [WELL]
        await until(lambda: watched.worker.up)
        assert problems.LATE not in watched.worker.problems


def asleep(yes: bool) -> tuple[int, bytes]:
    return 200, json.dumps({"is_sleeping": yes}).encode()


async def test_a_vllm_that_is_put_to_sleep_gets_nothing_until_it_is_awake() -> None:
    """It goes on answering /health, and requests would wait for a minute."""
    session = ScriptedSession([WELL], {**VLLM, sleep.PATH: asleep(False)})
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: watched.worker.up)
        session.details[sleep.PATH] = asleep(True)
        await until(lambda: not watched.worker.up)
        assert watched.trouble == ASLEEP
        session.details[sleep.PATH] = asleep(False)
        await until(lambda: watched.worker.up)


async def test_a_vllm_that_sleeps_from_the_start_does_not_serve() -> None:
    session = ScriptedSession([WELL], {**VLLM, sleep.PATH: asleep(True)})
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await watched.watch.first_check.wait()
        assert (watched.worker.up, watched.trouble) == (False, ASLEEP)
        session.details[sleep.PATH] = asleep(False)
        await until(lambda: watched.worker.up)


@pytest.mark.parametrize(("answer", "asked"), [((404, b""), 1), ((200, b"?"), 3), (None, 1)])
async def test_one_that_does_not_tell_is_awake_and_not_asked_again(
    answer: tuple[int, bytes] | None, asked: int
) -> None:
    session = ScriptedSession([WELL], VLLM if answer is None else {**VLLM, sleep.PATH: answer})
    async with watching("http://w:80", cast("aiohttp.ClientSession", session)) as watched:
        await until(lambda: session.checks > 3)
        assert watched.worker.up
        assert min(session.asked[sleep.PATH], 3) == asked


async def test_workers_that_joined_together_are_not_looked_at_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them would hold up all requests each time."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        raise asyncio.CancelledError

    session = cast("aiohttp.ClientSession", ScriptedSession([REFUSED]))
    workers = [Worker(spec, Pool(spec.url, 1.0)) for spec in map(parse_worker, (f"http://w{n}:80" for n in range(8)))]
    fleet = Fleet(workers)

    async def taken_in(_: Worker) -> None:
        raise AssertionError("none is up")

    watches = [WorkerWatch(worker, fleet, session, 60.0, taken_in) for worker in workers]
    monkeypatch.setattr("router.workers.watch.asyncio.sleep", sleep)
    await asyncio.gather(*(watch.run() for watch in watches), return_exceptions=True)
    assert all(watch.first_check.is_set() for watch in watches)
    assert all(0.0 < seconds <= 60.0 + EARLY for seconds in waits)
    assert len({int(seconds) for seconds in waits}) > len(watches) / 2
