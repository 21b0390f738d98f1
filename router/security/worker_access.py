"""API keys and TLS towards workers, from the files that the flags `--worker-…` name."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import aiohttp

from publishers.credentials import client_context, load_authorities, load_pair, make_session, read_key


class WorkerFiles(Protocol):
    """Paths; None: not given."""

    @property
    def worker_api_key_file(self) -> str | None: ...
    @property
    def worker_ca(self) -> str | None: ...
    @property
    def worker_cert(self) -> str | None: ...
    @property
    def worker_key(self) -> str | None: ...


class WorkerAccess(NamedTuple):
    key: str | None = None
    context: ssl.SSLContext | None = None
    """For `https://`; None: the system's authorities, and no certificate of ours."""

    def session(self, urls: Callable[[], Iterable[str]]) -> aiohttp.ClientSession:
        """For asking the workers at `urls`, those of the moment."""
        return make_session(urls, self.key, self.context)


def read_access(files: WorkerFiles) -> WorkerAccess:
    """Raises ValueError for a file that cannot be used."""
    context = client_context("--worker", files.worker_ca, files.worker_cert, files.worker_key)
    path = files.worker_api_key_file
    return WorkerAccess(read_key("--worker-api-key-file", path) if path else None, context)


def load_again(context: ssl.SSLContext, files: WorkerFiles) -> None:
    """The certificate, and the authorities beside those before, as they are now, for the connections to come. Raises
    ValueError."""
    if files.worker_ca is not None:
        load_authorities(context, "--worker-ca", files.worker_ca)
    load_pair(context, ("--worker-cert", files.worker_cert), ("--worker-key", files.worker_key))
