"""Each setting reads its own text and says what it takes when it cannot; workers are read from all their forms."""

from __future__ import annotations

import pytest

from router.settings import Option, Settings, SettingsError, options
from router.workers.spec import WorkerSpec, parse_worker, read_workers, worker_from_mapping

BY_KEY = {option.key: option for option in options()}


@pytest.mark.parametrize("option", options(), ids=lambda o: o.key)
def test_every_setting_is_explained(option: Option) -> None:
    assert option.help.endswith(".")
    assert option.takes
    assert option.is_switch or option.metavar


@pytest.mark.parametrize("option", options(), ids=lambda o: o.key)
def test_every_default_is_what_its_text_reads_as(option: Option) -> None:
    if option.key != "worker":
        assert option.read(option.default_text, "here", text=True) == option.default


def test_flags_and_variables_are_all_different() -> None:
    assert len({o.flag for o in options()}) == len({o.variable for o in options()}) == len(options())


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("port", "0", 0),
        ("host", "[::1]", "::1"),
        ("host", "::1", "::1"),
        ("max_body_size", "64MiB", 67_108_864),
        ("max_body_size", "10 KiB", 10_240),
        ("max_body_size", "123", 123),
        ("index_max_memory", "2GiB", 2 << 30),
        ("drain_timeout", "0.5", 0.5),
        ("router_mode", "power-of-two", "power-of-two"),
        ("kv_overlap_score_weight", "0", 0.0),
        ("kv_events", "false", False),
        ("seed", "7", 7),
        ("event_plane", "nats://a:4222,nats://b:4222", "nats://a:4222,nats://b:4222"),
        ("event_plane", "nats+embedded://", "nats+embedded://"),
        ("event_plane", "nats+embedded://127.0.0.1:4222", "nats+embedded://127.0.0.1:4222"),
    ],
)
def test_text_becomes_a_value(key: str, text: str, value: object) -> None:
    assert BY_KEY[key].read(text, "here", text=True) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "80.5"),
        ("host", "two words"),
        ("max_body_size", "0"),
        ("index_max_memory", "1023KiB"),
        ("max_body_size", "64MB"),
        ("drain_timeout", "inf"),
        ("connect_timeout", "0"),
        ("router_mode", "KV"),
        ("router_temperature", "nan"),
        ("kv_overlap_score_weight", "1e308"),
        ("router_temperature", "-0.1"),
        ("kv_events", "maybe"),
        ("seed", "x"),
        ("event_plane", "redis://h"),
        ("event_plane", "nats://"),
        ("event_namespace", "a.b"),
        ("event_namespace", "a\n"),
        ("tokenizer", ""),
        ("log_level", "loud"),
    ],
)
def test_bad_text_is_told_with_what_is_taken(key: str, text: str) -> None:
    option = BY_KEY[key]
    with pytest.raises(SettingsError) as caught:
        option.read(text, option.flag, text=True)
    assert str(caught.value) == f"{option.flag} takes {option.takes}, not {text!r}."


@pytest.mark.parametrize(
    "worker",
    ["http://user:secret@a:99999", "ftp://user:secret@a:1", "http://user:secret@a:1,b", "http://a:1,//u:secret@b"],
)
def test_a_password_is_not_repeated_whatever_else_is_wrong(worker: str) -> None:
    with pytest.raises(SettingsError, match=r"^--worker: ") as caught:
        BY_KEY["worker"].read(worker, "--worker", text=True)
    assert "secret" not in str(caught.value)


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(SettingsError, match="not 'nat://h:4222'") as caught:
        BY_KEY["event_plane"].read("nat://user:secret@h:4222", "--event-plane", text=True)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("port", "8080"), ("host", 1), ("kv_events", 1), ("log_level", None)])
def test_typed_sources_are_not_converted(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"f.yaml: {key} takes "):
        BY_KEY[key].read(value, f"f.yaml: {key}", text=False)


def test_a_whole_number_is_also_a_number() -> None:
    assert BY_KEY["drain_timeout"].read(30, "f", text=False) == 30.0


def test_settings_can_be_made_in_code() -> None:
    worker = parse_worker("http://a:1")
    assert Settings(workers=(worker,)).workers == (worker,)


@pytest.mark.parametrize(
    ("text", "url", "worker_id"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000", "10.0.0.7:8000"),
        ("http://Host:8000/", "http://host:8000", "host:8000"),
        ("https://host", "https://host:443", "host:443"),
        ("HTTP://host/base/path/", "http://host:80/base/path", "host:80"),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000"),
        ("http://a:1,name=one", "http://a:1", "one"),
    ],
)
def test_urls_are_normalised_and_name_the_worker(text: str, url: str, worker_id: str) -> None:
    assert parse_worker(text) == WorkerSpec(url=url, worker_id=worker_id)


def test_a_worker_with_everything_stated() -> None:
    text = "http://a:1,events=tcp://a:5557,replay=tcp://a:5558,block_size=32,role=prefill,name=p"
    expected = WorkerSpec("http://a:1", "p", "tcp://a:5557", "tcp://a:5558", 32, "prefill")
    mapping = {"url": "http://a:1", "events": "tcp://a:5557", "replay": "tcp://a:5558", "block_size": 32}
    assert parse_worker(text) == expected
    assert worker_from_mapping(mapping | {"role": "prefill", "name": "p"}) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "url takes text"),
        ("a:8000", "not an engine's address"),
        ("ftp://a", "http or https"),
        ("http://a:99999", "Port out of range"),
        ("http://a:1/v1", "leave it out"),
        ("http://a:0", "no host, port or path"),
        ("http://[::1]8000", "beside the brackets"),
        ("http://[::1]*", "beside the brackets"),
        ("http://a[::1]:8000", "brackets|IPv6"),
        ("http://-a:1", "no host, port or path"),
        ("http://a..b:1", "no host, port or path"),
        ("http://ä:1", "no host, port or path"),
        ("http://a:1/ä", "no host, port or path"),
        ("http://" + "a" * 64, "no host, port or path"),
        ("http://" + "a." * 126 + "aa", "no host, port or path"),
        ("http://a:1?x=1", r"\? or #"),
        ("http://user:secret@a:1", "user or a password"),
        ("http://a:1,block_size", "not key=value"),
        ("http://a:1,block_size=0", "at least 1"),
        ("http://a:1,block_size=big", "at least 1"),
        ("http://a:1,role=both,role=both", "given twice"),
        ("http://a:1,role=draft", "prefill, decode or both"),
        ("http://a:1,block-size=16", "did you mean 'block_size'"),
        ("http://a:1,zzz=16", "the keys are"),
        ("http://a:1,events=a:5557", "tcp://HOST:5557"),
        ("http://a:1,events=tcp://*:5557", "tcp://HOST:5557"),
        ("http://a:1,events=tcp://a", "tcp://HOST:5557"),
        ("http://a:1,events=tcp://a:0", "tcp://HOST:5557"),
        ("http://a:1,replay=tcp://a:65536", "tcp://HOST:5557"),
        ("http://a:1,name=", "takes text"),
        ("http://a:1,name=a/b", "letters"),
    ],
)
def test_a_bad_worker_is_explained(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_worker(text)


@pytest.mark.parametrize("plane", ["nats://me:XX YY@h", "nats://me:XX/YY @h", "me:XX@h", "nats//me:XX,YY@h"])
def test_a_password_is_not_repeated_of_what_is_no_url(plane: str) -> None:
    with pytest.raises(SettingsError, match=r"^--event-plane takes .*h' \(left out: user and password\)\.$") as caught:
        BY_KEY["event_plane"].read(plane, "--event-plane", text=True)
    assert not any(part in str(caught.value) for part in ("XX", "YY", "me:"))


def test_a_password_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ValueError, match="password") as caught:
        parse_worker("http://user:secret@a:1")
    assert "secret" not in str(caught.value)


def test_workers_come_from_text_or_from_a_list() -> None:
    expected = (WorkerSpec("http://a:1", "a:1"), WorkerSpec("http://b:1", "b:1"))
    assert read_workers("http://a:1\n  http://b:1 ") == expected
    assert read_workers(["http://a:1", {"url": "http://b:1"}]) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (["http://a:1", "http://A:1/"], "URL 'http://a:1'"),
        (["http://a:1,name=x", "http://b:1,name=x"], "name 'x'; tell them apart"),
        (["http://a:1/x", "http://a:1/y"], "name 'a:1'; tell them apart"),
        ({"url": "http://a:1"}, "takes a list"),
        ([7], "7 is neither"),
        ([{"name": "x"}], "needs a url"),
        ([{"url": 7}], "url takes text"),
        ([{"url": "http://a:1", "block_size": "16"}], "block_size takes"),
    ],
)
def test_bad_lists_of_workers_are_explained(value: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_workers(value)
