"""Makes the event plane that an operator's URL names."""

from __future__ import annotations

from urllib.parse import SplitResult

from publishers.credentials import NatsFiles
from publishers.embedded_nats import EmbeddedNatsPlane, NatsServer
from publishers.local_plane import LocalPlane
from publishers.nats_access import check_files
from publishers.nats_plane import NatsPlane
from publishers.plane import EventPlane
from publishers.urls import split_url

EXPECTED = "'local', nats://[USER:PASSWORD@]HOST[:PORT], tls://HOST[:PORT] or nats+embedded://[HOST][:PORT]"


_NO_FILES = NatsFiles()


def make_plane(url: str, files: NatsFiles = _NO_FILES) -> EventPlane:
    """The plane that `url` names, not yet started.

    `local`; `nats://` or `tls://`, several separated by commas (port 4222 unless given); `nats+embedded://`, which
    starts a nats-server (host 127.0.0.1 and a free port unless given). `files` are for `nats://` and `tls://` only.
    Raises ValueError with a sentence for people.
    """
    if files != _NO_FILES and not url.lower().startswith(("nats://", "tls://")):
        raise ValueError("--nats-creds, -nkey-seed, -ca, -cert and -key are for nats://HOST:PORT or tls://HOST:PORT.")
    if url == "local":
        return LocalPlane()
    if url.startswith("nats+embedded://"):
        return EmbeddedNatsPlane(embedded_server(url))
    urls = []
    for one in url.split(","):
        parts = _split(one, url)
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise _wrong(one, url)
        urls.append(parts.geturl())  # nats-py takes NATS://HOST for a host called NATS
    check_files(urls, files)
    return NatsPlane(urls, files=files)


def embedded_server(url: str) -> NatsServer:
    """The one that `nats+embedded://[HOST][:PORT]` names, not yet started. Raises ValueError."""
    parts = _split(url, url)
    if parts.username is not None:
        raise ValueError("nats+embedded:// starts a server that requires no login: leave out user and password.")
    return NatsServer(parts.hostname or "127.0.0.1", parts.port or 0)


def _split(url: str, whole: str) -> SplitResult:
    """`whole`: what it was stated in."""
    try:
        parts = split_url(url)
        _ = parts.port  # raises ValueError for what is no port number
    except ValueError:
        raise _wrong(url, whole) from None
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise _wrong(url, whole)
    return parts


def _wrong(url: str, whole: str) -> ValueError:
    # The password, if there is one, stays out of the message: `url` may end in the middle of it.
    _, login, behind = whole.rpartition("@")
    hint = "; what is no letter or digit in a user or a password must be percent-encoded" if login else ""
    hint += "; each of several begins with nats:// or tls://" if "," in behind else ""
    return ValueError(f"{(behind if login else url)!r} names no event plane: expected {EXPECTED}{hint}.")
