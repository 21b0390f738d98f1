"""API keys and TLS towards workers, from the files that the flags `--worker-…` name."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import aiohttp

from publishers.credentials import client_context, make_session, read_key
from router.security.newest import Newest, newest_from


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
    context: Newest | None = None
    """For `https://`; None: the system's authorities, and no certificate of ours."""

    def session(self, urls: Callable[[], Collection[str]]) -> aiohttp.ClientSession:
        """For asking the workers at `urls`: see `make_session`."""
        return make_session(urls, self.key, self.context)


def read_access(files: WorkerFiles) -> WorkerAccess:
    """Raises ValueError for a file that cannot be used."""
    context = newest_from(worker_context(files))
    path = files.worker_api_key_file
    return WorkerAccess(read_key("--worker-api-key-file", path) if path else None, context)


def worker_context(files: WorkerFiles) -> ssl.SSLContext | None:
    """With the files as they are now; None where none is given. Raises ValueError."""
    return client_context("--worker", files.worker_ca, files.worker_cert, files.worker_key)
