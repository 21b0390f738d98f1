"""Where settings come from, which source wins, and how mistakes are told."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from publishers.cli import parse
from publishers.streams import open_standard_streams
from router.__main__ import main
from router.cli import load_settings, make_parser
from router.commands import COMMANDS
from router.settings import GROUPS, Settings, SettingsError, options
from router.settings.administration import Address
from tests.fakes.full_stream import FullStream

WORKER = ["--worker", "http://a:1"]
ROOT = Path(__file__).parents[2]
OTHERS = ("store-simulation", "prometheus")
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem not in OTHERS)


def write(folder: Path, text: str) -> str:
    path = folder / "router.yaml"
    path.write_text(text, "utf-8")
    return str(path)


def test_only_a_worker_is_needed() -> None:
    settings = load_settings(WORKER, {})
    assert [w.url for w in settings.workers] == ["http://a:1"]
    assert settings == Settings(workers=settings.workers)


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nseed: 1\napprox_ttl: 1\nworker: [http://file:1]\n")
    environ = {"ROUTER_PORT": "2", "ROUTER_SEED": "2", "ROUTER_WORKER": "http://variable:1"}
    settings = load_settings(["--config", file, "--port", "3", *WORKER], environ)
    assert (settings.port, settings.seed, settings.approx_ttl, settings.load_interval) == (3, 2, 1.0, 1.0)
    assert [w.worker_id for w in settings.workers] == ["a:1"]


def test_the_file_can_be_named_by_a_variable_and_the_flag_wins(tmp_path: Path) -> None:
    file = write(tmp_path, "worker:\n  - url: http://file:1\n    block_size: 16\n")
    assert load_settings([], {"ROUTER_CONFIG": file}).workers[0].block_size == 16
    assert load_settings(["--config", file], {"ROUTER_CONFIG": "/nowhere"}).workers[0].block_size == 16


def test_every_setting_can_be_given_in_each_way(tmp_path: Path) -> None:
    others = [o for o in options() if not o.is_switch and o.key not in {"worker", "seed"}]
    flags = [part for o in others for part in (o.flag, o.default_text)]
    variables = {o.variable: o.default_text for o in others}
    file = write(tmp_path, "".join(f"{o.key}: {o.default_text}\n" for o in others))
    expected = load_settings(WORKER, {})
    assert load_settings(flags + WORKER, {}) == expected
    assert load_settings(WORKER, variables) == expected
    assert load_settings(["--config", file, *WORKER], {}) == expected


@pytest.mark.parametrize("address", ["127.0.0.1:9090", "127.1.2.3:0", "[::1]:1", "localhost:80"])
def test_an_admin_surface_may_begin_without_workers(address: str) -> None:
    listen = load_settings(["--admin-listen", address], {}).admin_listen
    assert listen is not None
    assert f"{listen.host}:{listen.port}" == address.replace("[", "").replace("]", "")


def test_with_keys_the_admin_surface_may_listen_anywhere() -> None:
    listen = load_settings(["--admin-listen", "0.0.0.0:9090", "--api-keys", "keys.yaml"], {}).admin_listen
    assert listen == Address("0.0.0.0", 9090)


def test_a_pipe_cannot_be_watched() -> None:
    end, other = os.pipe()
    os.close(other)
    with pytest.raises(SettingsError, match="needs a file to watch"):
        load_settings([*WORKER, "--watch-config", "--config", f"/dev/fd/{end}"], {})
    os.close(end)


def test_a_switch_has_two_flags() -> None:
    assert load_settings(["--no-kv-events", *WORKER], {"ROUTER_KV_EVENTS": "true"}).kv_events is False
    assert load_settings(["--kv-events", *WORKER], {"ROUTER_KV_EVENTS": "false"}).kv_events is True


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        ([], {}, "There is no worker to route to; name each with --worker http://HOST:PORT."),
        (
            [*WORKER, "--admin-listen", "127.0.0.1"],
            {},
            "--admin-listen takes an address such as",
        ),
        ([*WORKER, "--admin-listen", "0.0.0.0:1"], {}, "--admin-listen: others may reach 0.0.0.0, and need no key"),
        ([*WORKER, "--admin-listen", "[::]:1"], {}, "--admin-listen: others may reach ::"),
        ([*WORKER, "--admin-listen", "h:1"], {}, "--admin-listen: others may reach h"),
        ([*WORKER, "--admin-listen", "127.0.0.1:1", "--processes", "2"], {}, "--admin-listen needs one process"),
        ([*WORKER, "--admin-listen", "127.0.0.1:1", "--port", "1"], {}, "--admin-listen and --port are both 1"),
        (
            [*WORKER, "--admin-listen", "127.0.0.1:8080", "--host", "0.0.0.0"],
            {},
            "--admin-listen and --port are both 8080",
        ),
        ([*WORKER, "--watch-config"], {}, "--watch-config needs a file to watch"),
        (["--port", "x"], {}, "--port takes a whole number from 0 to 65535, not 'x'."),
        (["--port"], {}, "--port takes a whole number from 0 to 65535: expected one argument."),
        (["--prot", "1"], {}, "There is no flag --prot; did you mean --port?"),
        (
            ["--zzzzzz=1"],
            {},
            "There is no flag --zzzzzz; --help lists all, docs/coming-from.md the counterparts of other",
        ),
        (["--worker-urls", "http://a"], {}, "There is no flag --worker-urls; did you mean --worker?"),
        (["--worker-cart", "x"], {}, "There is no flag --worker-cart; did you mean --worker-cert?"),
        (["--queue-timeout-secs=9"], {}, "There is no flag --queue-timeout-secs; did you mean --queue-timeout?"),
        (["--kv-cache-block-size", "16"], {}, "There is no flag --kv-cache-block-size; --help lists all, docs/coming"),
        (["--policy", "random"], {}, "There is no flag --policy; did you mean --router-mode?"),
        (["--retry-max-retries", "1"], {}, "There is no flag --retry-max-retries; --help lists all, docs/coming-from"),
        (
            ["--worker", "http://a", "http://b"],
            {},
            "'http://b' belongs to no flag; each worker needs its own --worker. (Commands come first: ab,",
        ),
        (["http://a"], {}, "'http://a' belongs to no flag; each worker needs its own --worker."),
        (["frob", *WORKER], {}, "There is no command 'frob'; there are ab, simulate, store, keys and compile, and"),
        ([*WORKER, "frob"], {}, "'frob' belongs to no flag; each worker needs its own --worker."),
        (
            [*WORKER, "--kv-events", "false"],
            {},
            "--kv-events takes no value; write --kv-events or --no-kv-events, and nothing behind it.",
        ),
        (["--no-kv-events=true"], {}, "--kv-events takes no value; write --kv-events or --no-kv-events, and nothing"),
        (["--no-kv-event"], {}, "There is no flag --no-kv-event; did you mean --no-kv-events?"),
        (["--worker", "a:1"], {}, "--worker: 'a:1' is not an engine's address"),
        (
            ["--event-host", "http://x"],
            {},
            "--event-host: 'http://x' is no host's name or address; give one such as 10",
        ),
        (
            [],
            {"ROUTER_EVENT_HOST": "a 10.0.0.7:5557"},
            "ROUTER_EVENT_HOST: '10.0.0.7:5557' is no host's name or address",
        ),
        (
            ["--allowed-origin", "chat.example.com"],
            {},
            "--allowed-origin: 'chat.example.com' is no origin; give one as",
        ),
        (["--allowed-origin", "https://a/"], {}, "--allowed-origin: 'https://a/' is no origin"),
        ([], {"ROUTER_ALLOWED_ORIGIN": "* https://A"}, "ROUTER_ALLOWED_ORIGIN: 'https://A' is no origin"),
        (["--otlp-traces-endpoint", "localhost:4317"], {}, "--otlp-traces-endpoint: 'localhost:4317' is no URL; give"),
        (
            ["--otlp-traces-endpoint", "http://otel:4318/"],
            {},
            "--otlp-traces-endpoint: 'http://otel:4318/' has no path; collectors take spans at http://otel:4318/v1/traces.",
        ),
        ([], {"ROUTER_PORT": "x"}, "ROUTER_PORT takes a whole number from 0 to 65535, not 'x'."),
        # A byte that is no UTF-8, as Python shows one of a command line or a variable:
        (["--port", "\udcff"], {}, "--port takes a whole number from 0 to 65535, not '\\udcff'."),
        ([], {"ROUTER_KV_EVENTS": "\udcff"}, "ROUTER_KV_EVENTS takes true or false, not '\\udcff'."),
        (
            [],
            {"ROUTER_WORKER": "http://a,http://b"},
            (
                "ROUTER_WORKER: 'http://b' in 'http://a,http://b' is not key=value; the keys are events, replay, "
                "block_size, role, connector, bootstrap_port, host, store, name; each worker needs its own --worker "
                "(in YAML a line, in ROUTER_WORKER a blank before it)."
            ),
        ),
        (
            ["--worker", "http://a:1 http://b:1"],
            {},
            "--worker: 'http://a:1 http://b:1' holds a blank; each worker needs",
        ),
        ([], {"ROUTER_WORKER": "http://a http://a"}, "ROUTER_WORKER: two workers have the URL 'http://a:80'."),
        (["--config", "", "--worker", "http://a"], {}, "--config: . cannot be read: Is a directory."),
        (["--config", "/nowhere.yaml"], {}, "--config: /nowhere.yaml cannot be read: No such file or directory."),
        (
            [],
            {"ROUTER_CONFIG": "/nowhere.yaml"},
            "ROUTER_CONFIG: /nowhere.yaml cannot be read: No such file or directory.",
        ),
    ],
)
def test_mistakes_are_one_sentence_that_names_the_place(argv: list[str], environ: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(argv, environ)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "there is no setting 'prot'; did you mean port?"),
        ("workers: []", "there is no setting 'workers'; did you mean worker?"),
        ("port: '1'", "port takes a whole number from 0 to 65535, not '1'."),
        ("kv_events: 1", "kv_events takes true or false, not 1."),
        ("worker: [{uri: http://a}]", "worker: a worker has no 'uri'; did you mean 'url'?"),
        ("port: [", "is not valid YAML"),
        ("port: 1\nhost: a\nport: 2", "line 3: 'port' is given twice."),
        ("? [a]\n: 1", "line 1: a key is no text."),
        ("port: 2001-99-99", "is not valid YAML: month must be in 1..12."),
        ("port: !!bool x", "is not valid YAML"),
        ("port: !!timestamp x", "is not valid YAML"),
        ("port: " + "[" * 1000, "is not valid YAML"),
        ("port: " + "9" * 5000, "is not valid YAML"),
        ("admin_listen: {host: 127.0.0.1, port: 99999}", "admin_listen takes an address such as 127.0.0.1:9090"),
        ("store: 'http://a..b:9003'", "store: the store's url is that of the master's metrics port"),
        ("store: 'http://a b:9003'", "store: the store's url is that of the master's metrics port"),
        ("store: 'http://m:9003#x'", "store: the store's url is that of the master's metrics port"),
        ("store: 'http://m:9003,tp=2,tp=4'", "store: a key is given twice in 'http://m:9003,tp=2,tp=4'"),
        ("store: http://10.0.0.5:90000", "store: the store's url is that of the master's metrics port"),
        ("store: 'http://m:9003,rpc=m'", "store: the store's rpc is HOST:PORT"),
        ("store: 'http://m:9003,rpc=http://m:1'", "store: the store's rpc is HOST:PORT"),
        ("store: 'http://m:9003,copy=-1'", "store: the store's copy takes a whole number of at least 0, not '-1'"),
        ("store: 'http://[::1'", "store: the store's url is that of the master's metrics port"),
        ("- port", "must hold keys and values"),
        ("", "There is no worker"),
    ],
)
def test_mistakes_in_a_file_name_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load_settings(["--config", file], {})
    assert says in str(caught.value)
    assert file in str(caught.value) or not text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ROUTER_PROT", "did you mean ROUTER_PORT?"),
        ("ROUTER_WORKERS", "did you mean ROUTER_WORKER?"),
        ("ROUTER_ROUTER_MODE", "did you mean ROUTER_MODE?"),
        ("ROUTER_FOO", "--help lists all."),
        ("ROUTER_REPLICAS", "--help lists all."),
    ],
)
def test_an_unknown_variable_is_a_warning_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture, name: str, hint: str
) -> None:
    with caplog.at_level(logging.WARNING):
        load_settings(WORKER, {name: "1", "OTHER": "x"})
    assert caplog.messages == [f"The variable {name} means nothing to the router; {hint}"]


def test_what_kubernetes_says_of_a_service_named_router_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    links = {
        "ROUTER_PORT": "tcp://10.0.0.1:80",
        "ROUTER_SERVICE_HOST": "10.0.0.1",
        "ROUTER_PORT_80_TCP": "tcp://10.0.0.1",
    }
    assert load_settings(WORKER, links).port == 8080
    assert caplog.messages == []


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_settings(WORKER, {"ROUTER_PORT": ""}).port == 8080


def test_help_names_the_other_commands() -> None:
    told = " ".join((make_parser().description or "").split())
    assert all(f"{name} (" in told for name in COMMANDS)


@pytest.mark.parametrize("argv", [["frob"], ["http://a"]])
def test_so_does_what_is_said_of_none_of_them(argv: list[str]) -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings(argv, {})
    assert all(re.search(rf"\b{name}\b", str(raised.value)) for name in COMMANDS)


def test_help_explains_every_flag_with_its_default_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = make_parser().format_help()
    for option in options():
        section = text.partition(f"{option.group}:\n")[2].partition("\n\n")[0]
        assert option.flag in section
        assert f"{option.help} (default: {option.default_text})" in section
    for group in GROUPS:
        assert f"{group}:" in text


def test_help_begins_with_what_everybody_needs() -> None:
    text = make_parser().format_help()
    places = [text.index(f"\n{group}:\n") for group in ("General", "Workers", "Serving", "Routing")]
    assert places == sorted(places)
    assert places[-1] < text.index("\nLimits:\n") < text.index("\nSecurity:\n")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_the_examples_load(path: Path) -> None:
    assert load_settings(["--config", str(path)], {}).workers


def test_the_example_of_nats_names_its_publisher_as_the_router_does() -> None:
    text = (ROOT / "configs" / "nats.yaml").read_text("utf-8")
    command = next(line for line in text.splitlines() if "kv-publisher" in line)
    publisher = parse(shlex.split(command)[2:])
    settings = load_settings(["--config", str(ROOT / "configs" / "nats.yaml")], {})
    assert publisher.worker_id in {worker.worker_id for worker in settings.workers}
    assert (publisher.nats, publisher.namespace) == (settings.event_plane, settings.event_namespace)


def test_behind_a_gateway_in_an_example_events_are_not_looked_for_at_the_gateway() -> None:
    settings = load_settings(["--config", str(ROOT / "configs" / "mixed-fleet.yaml")], {})
    [behind] = [worker for worker in settings.workers if "gateway" in worker.url]
    for endpoint in (behind.events, behind.replay):
        assert endpoint
        assert "gateway" not in endpoint


def test_there_are_examples() -> None:
    assert {path.name for path in CONFIGS} >= {"minimal.yaml", "nats.yaml", "mixed-fleet.yaml"}


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_asking_for_text_ends_well(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    assert "kv-router" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ab", "--help"]])
def test_asking_for_text_where_nobody_can_read_it_does_not_end_well(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is closed, or the disk that it leads to is full."""
    monkeypatch.setattr(sys, "stdout", None)
    open_standard_streams()
    with closing(sys.stdout):
        assert main(arguments) == 1
    sys.stdout.close()
    said = capsys.readouterr().err
    assert said.endswith(": standard output is closed, and what was to be shown there lost\n")
    monkeypatch.setattr(sys, "stdout", FullStream())
    assert main(arguments) == 1
    sys.stdout.close()
    said = capsys.readouterr().err
    assert said.endswith(": No space left on device\n")


def test_a_mistake_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "x"]) == 2
    assert capsys.readouterr().err == "kv-router: --port takes a whole number from 0 to 65535, not 'x'.\n"


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, function: str, calls: list[object]) -> None:
    module = ModuleType(name)

    def record(argument: object, *_: object) -> int:
        calls.append(argument)
        return 7

    setattr(module, function, record)
    monkeypatch.setitem(sys.modules, name, module)


def test_main_serves_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    stand_in(monkeypatch, "router.serve", "run", calls)
    monkeypatch.setattr("os.environ", {})
    assert main(WORKER) == 7
    assert calls == [load_settings(WORKER, {})]


def test_ab_gets_the_rest_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    stand_in(monkeypatch, "router.ab", "nothing", [])
    stand_in(monkeypatch, "router.ab.cli", "main", calls)
    assert main(["ab", "--x", "1"]) == 7
    assert calls == [["--x", "1"]]
