"""Log lines carry their fields, stay on one line, and JSON lines parse."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from indexer.types import WorkerRank
from publishers.logs import configure_logging, log_event

log = logging.getLogger("router.test")


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("aiohttp", "asyncio", "nats", "numba"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def lines(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level, log_format, stream)
    return stream


def test_text_has_time_level_logger_message_and_fields() -> None:
    out = lines("text")
    log_event(log, logging.INFO, "Worker added", worker="a:1", blocks=12, wait=0.25, note="two words", empty="")
    time, rest = out.getvalue().split(" ", 1)
    assert time.endswith("Z")
    assert "T" in time
    assert rest == 'info    router.test Worker added worker=a:1 blocks=12 wait=0.25 note="two words" empty=""\n'


def test_json_has_the_same() -> None:
    out = lines("json")
    log_event(log, logging.WARNING, "Worker lost", worker="é", rank=0)
    entry = json.loads(out.getvalue())
    assert list(entry) == ["time", "level", "logger", "message", "worker", "rank"]
    del entry["time"]
    expected = {"level": "warning", "logger": "router.test", "message": "Worker lost", "worker": "é", "rank": 0}
    assert entry == expected


def test_a_field_does_not_hide_what_every_line_has() -> None:
    out = lines("json")
    log_event(log, logging.INFO, "Real", message="forged", level="x")
    entry = json.loads(out.getvalue())
    assert (entry["message"], entry["level"]) == ("Real", "info")


@pytest.mark.parametrize(("log_format", "field"), [("text", " process=1"), ("json", '"process": 1')])
def test_fields_of_every_line(log_format: str, field: str) -> None:
    out = io.StringIO()
    configure_logging("info", log_format, out, {"process": 1})
    log.info("Plain")
    log_event(log, logging.INFO, "Worker lost", worker="a")
    assert [field in line for line in out.getvalue().splitlines()] == [True, True]


def test_what_json_does_not_know_is_written_as_text() -> None:
    out = lines("json")
    log_event(log, logging.INFO, "m", thing=ValueError("x"))
    assert json.loads(out.getvalue())["thing"] == "x"


@pytest.mark.parametrize(("log_format", "field"), [("text", " worker=w#0"), ("json", '"worker": "w#0"')])
def test_a_rank_has_the_same_name_in_both(log_format: str, field: str) -> None:
    out = lines(log_format)
    log_event(log, logging.INFO, "Decided", worker=WorkerRank("w", 0))
    assert field in out.getvalue()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_break_cannot_forge_a_line(log_format: str) -> None:
    out = lines(log_format)
    log_event(log, logging.INFO, "first\nsecond", worker="a\nb")
    log.info("plain %s", "x\ny")
    assert out.getvalue().count("\n") == 2


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nothing_that_a_terminal_or_a_reader_of_lines_obeys_stays(log_format: str) -> None:
    """ESC begins an order to a terminal, and so does U+009B; U+0085 and U+2028 end a line; U+202E turns text around."""
    out, orders = lines(log_format), "\x1b[2J\x9b2J\x85\u2028\u202e\x7f"
    log_event(log, logging.INFO, f"é{orders}", model=f"é{orders}")
    assert out.getvalue().removesuffix("\n").isprintable()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_is_shown_with_its_trace(log_format: str) -> None:
    out = lines(log_format)
    try:
        int("gone")
    except ValueError:
        log.exception("Failed")
    assert "ValueError" in out.getvalue()


def test_the_level_is_kept_and_libraries_are_quiet() -> None:
    out = lines("text", "warning")
    log.info("no")
    log.warning("yes")
    assert out.getvalue().count("\n") == 1
    out = lines("text", "info")
    logging.getLogger("aiohttp.access").info("no")
    assert out.getvalue() == ""
    out = lines("text", "debug")
    logging.getLogger("aiohttp.access").info("yes")
    assert out.getvalue().count("\n") == 1


def test_the_compiler_is_quiet_at_every_level() -> None:
    out = lines("text", "debug")
    logging.getLogger("numba.core.ssa").debug("thousands of such, with the first request")
    assert out.getvalue() == ""


def test_configuring_again_does_not_double_lines() -> None:
    lines("text")
    out = lines("text")
    log.info("once")
    assert out.getvalue().count("once") == 1


def test_the_caller_is_where_the_event_was_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_event(log, logging.INFO, "here")
    assert caplog.records[0].filename == "test_logs.py"
