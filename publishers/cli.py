"""The command line of a publisher."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence

import msgspec

from engines.command_line import Parser, version_of
from engines.endpoints import is_endpoint
from publishers.connect import make_plane
from publishers.credentials import NatsFiles
from publishers.load_poller import INTERVAL
from publishers.plane import NAMESPACE_TAKES, WORKER_ID_TAKES, is_namespace, is_worker_id
from publishers.urls import DEFAULT_PORTS, host_and_port, is_bare_host, split_url

_DESCRIPTION = """\
Runs beside one engine (vLLM, SGLang or whatever speaks like them): reads its KV cache events and its load, and
publishes both on NATS, to which routers with --event-plane nats://... subscribe. Token ids stay on this host: only
hashes are published."""

_EPILOG = """\
Example: kv-publisher --engine http://127.0.0.1:8000 --nats nats://nats:4222
SIGTERM or SIGINT ends it with status 0."""

_EVENTS = """ZMQ endpoint of its KV events, such as tcp://HOST:5557; with tcp://*:PORT the publisher listens and the
engine connects. Further data-parallel ranks are at the next ports. (default: what the engine reports)"""
_EVENT_HOST = """A host besides the engine's own from which its events are read, if the engine reports that it publishes
there; repeat the flag for each."""
_REPLAY = """ZMQ endpoint where the engine replays past events; in tcp://*:PORT, * stands for the host of --engine.
(default: what the engine reports)"""
_BLOCK_SIZE = "Tokens per KV block, if the engine does not report it. (default: what the engine reports)"
_LOAD_INTERVAL = "Time between two load reports. (default: %(default)g)"
_NATS = """The NATS server: nats://[USER:PASSWORD@]HOST[:PORT], tls://... with encryption, several separated by commas;
nats+embedded://[HOST][:PORT] starts one here."""
_WORKER_ID = """The worker's name in the router, if that is not the HOST:PORT of --engine.
(default: HOST:PORT of --engine)"""
_NAMESPACE = """Keeps fleets that share a NATS server apart; must equal the router's --event-namespace.
(default: %(default)s)"""

_NATS_FILES = {
    "creds": "File with credentials for NATS (.creds: a JWT and its nkey).",
    "nkey-seed": "File with the nkey seed for NATS (SU...).",
    "ca": "The authorities (PEM) that sign the certificate of a tls:// NATS server. (default: the system's)",
    "cert": "The client certificate (PEM) to show to a tls:// NATS server.",
    "key": "The private key of --nats-cert (PEM, not encrypted).",
}
_WORKER_FILES = {
    "api-key-file": "File with the API key of the engine.",
    "ca": "The authorities (PEM) that sign the certificate of an https:// engine. (default: the system's)",
    "cert": "The client certificate (PEM) to show to an https:// engine.",
    "key": "The private key of --worker-cert (PEM, not encrypted).",
}

_LEVELS = ("debug", "info", "warning", "error")


class Options(msgspec.Struct, frozen=True):
    """What the command line says; None: found out from the engine."""

    engine: str
    nats: str
    worker_id: str
    namespace: str
    events: str | None
    replay: str | None
    block_size: int | None
    load_interval: float
    log_level: str
    log_format: str
    event_host: list[str] = []
    worker_api_key_file: str | None = None
    worker_ca: str | None = None
    worker_cert: str | None = None
    worker_key: str | None = None
    nats_creds: str | None = None
    nats_nkey_seed: str | None = None
    nats_ca: str | None = None
    nats_cert: str | None = None
    nats_key: str | None = None

    @property
    def nats_files(self) -> NatsFiles:
        return NatsFiles(self.nats_creds, self.nats_nkey_seed, self.nats_ca, self.nats_cert, self.nats_key)


def parse(argv: Sequence[str] | None) -> Options:
    """Prints and raises SystemExit: 0 for --help and --version, 2 for what is wrong, naming the flag."""
    given = vars(make_parser().parse_args(argv))
    return Options(**{**given, "worker_id": given["worker_id"] or host_and_port(split_url(given["engine"]))})


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="kv-publisher",
        usage="kv-publisher --engine URL --nats URL [FLAGS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    general = parser.add_argument_group("General")
    general.add_argument("-h", "--help", action="help", help="Show this text and exit.")
    general.add_argument(
        "--version", action="version", version=version_of("kv-publisher"), help="Show the version and exit."
    )
    _engine_flags(parser.add_argument_group("Engine"))
    _plane_flags(parser.add_argument_group("Event plane"))
    _log_flags(parser.add_argument_group("Logs"))
    return parser


def _engine_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--engine", metavar="URL", required=True, type=_engine, help="The engine's HTTP address, http://HOST:PORT.")
    add("--events", metavar="ENDPOINT", type=_endpoint, help=_EVENTS)
    add("--replay", metavar="ENDPOINT", type=_endpoint, help=_REPLAY)
    add("--event-host", metavar="HOST", type=_host, action="append", default=[], help=_EVENT_HOST)
    add("--block-size", metavar="N", type=_block_size, help=_BLOCK_SIZE)
    add("--load-interval", metavar="SECONDS", type=_seconds, default=INTERVAL, help=_LOAD_INTERVAL)
    for name, text in _WORKER_FILES.items():
        add(f"--worker-{name}", metavar="FILE", help=text)


def _plane_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--nats", metavar="URL", required=True, type=_nats, help=_NATS)
    add("--worker-id", metavar="NAME", type=_worker_id, help=_WORKER_ID)
    add("--namespace", metavar="NAME", type=_namespace, default="default", help=_NAMESPACE)
    for name, text in _NATS_FILES.items():
        add(f"--nats-{name}", metavar="FILE", help=text)


def _log_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--log-level", choices=_LEVELS, default="info", help="(default: %(default)s)")
    add(
        "--log-format", choices=("text", "json"), default="text", help="json: one object a line. (default: %(default)s)"
    )


def _takes(what: str, valid: Callable[[str], object], text: str) -> str:
    try:
        if valid(text):
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"it takes {what}, not {text!r}")


def _engine(text: str) -> str:
    def valid(text: str) -> bool:
        parts = split_url(text)
        _ = parts.port  # raises ValueError for what is no port number
        plain = not parts.query and not parts.fragment and not re.search(r"\s", text)
        whole = parts.scheme in DEFAULT_PORTS and bool(parts.hostname)
        return plain and whole and not parts.path.rstrip("/").endswith("/v1")  # below which no engine says what it is

    if re.match(r"[^/]*//[^/]*@", text):  # and so what is wrong is not shown either
        raise argparse.ArgumentTypeError("it takes an address without a user or a password, since it is shown in logs")
    return _takes("an address such as http://127.0.0.1:8000, without /v1", valid, text).rstrip("/")


def _endpoint(text: str) -> str:
    return _takes("a ZMQ endpoint such as tcp://HOST:5557", is_endpoint, text)


def _host(text: str) -> str:
    return _takes("a host's name or address such as 10.0.0.7, without http:// or a port", is_bare_host, text)


def _nats(text: str) -> str:
    try:
        if text != "local":
            make_plane(text)
            return text
    except ValueError:
        pass
    # Not quoted: it may hold a password.
    raise argparse.ArgumentTypeError(
        "it takes nats://[USER:PASSWORD@]HOST[:PORT], tls://HOST[:PORT] or nats+embedded://"
    )


def _worker_id(text: str) -> str:
    return _takes(WORKER_ID_TAKES, is_worker_id, text)


def _namespace(text: str) -> str:
    return _takes(NAMESPACE_TAKES, is_namespace, text)


def _block_size(text: str) -> int:
    return int(
        _takes("a positive whole number", lambda text: text.isascii() and text.isdigit() and int(text) > 0, text)
    )


def _seconds(text: str) -> float:
    return float(_takes("a positive number of seconds", lambda text: 0 < float(text) < math.inf, text))
