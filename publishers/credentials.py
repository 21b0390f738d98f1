"""Keys and certificates from files, for both shells. Errors name the flag and say what is wrong."""

from __future__ import annotations

import contextlib
import logging
import re
import ssl
import stat
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

import aiohttp
from yarl import URL

from publishers.logs import log_event

logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"[\x21-\x7e]+")
"""What may stand in a header's value as one word."""


class NatsFiles(NamedTuple):
    """How a NATS server is shown who we are, and how it shows who it is. Paths; None: not at all, and by the system's
    certificate authorities."""

    creds: str | None = None
    nkey_seed: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


def read_file(flag: str, path: str) -> str:
    """Raises ValueError."""
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{flag}: {path} cannot be read: {error.strerror or error}.") from None
    except ValueError:  # not UTF-8, or a path with a NUL
        raise ValueError(f"{flag}: {path} is not a text file.") from None


def read_key(flag: str, path: str) -> str:
    """The one word in a file. Raises ValueError, which does not quote it."""
    key = read_file(flag, path).strip()
    if not _TOKEN.fullmatch(key):
        raise ValueError(f"{flag}: {path} must hold one key, in ASCII and without blanks, and nothing else.")
    return key


def client_context(prefix: str, ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """For connecting; `{prefix}-ca`, `-cert` and `-key` are the files' flags. None without any. Raises ValueError."""
    if ca is None and cert is None and key is None:
        return None
    context = ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        load_authorities(context, f"{prefix}-ca", ca)
    load_pair(context, (f"{prefix}-cert", cert), (f"{prefix}-key", key))
    return context


def load_authorities(context: ssl.SSLContext, flag: str, path: str) -> None:
    read_file(flag, path)
    try:
        context.load_verify_locations(path)  # as `cadata` it would have to be ASCII, remarks too
    except ssl.SSLError:
        raise ValueError(f"{flag}: {path} holds no certificate in PEM form.") from None


def load_pair(context: ssl.SSLContext, cert: tuple[str, str | None], key: tuple[str, str | None]) -> None:
    """Each with its flag. Neither: nothing is loaded. Raises ValueError."""
    for (flag, path), (other, missing) in ((cert, key), (key, cert)):
        if path is not None and missing is None:
            raise ValueError(f"{flag} needs {other} beside it: a certificate and its private key go together.")
        if path is not None:
            read_file(flag, path)
    if cert[1] is None or key[1] is None:
        return
    try:
        context.load_cert_chain(cert[1], key[1], password=lambda: _encrypted(*key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{key[0]}: {key[1]} is not the key of the certificate in {cert[1]}.") from None
        raise ValueError(
            f"{cert[0]} and {key[0]}: {cert[1]} and {key[1]} hold no certificate and its key in PEM form."
        ) from None


def _encrypted(flag: str, path: str | None) -> NoReturn:
    """Else OpenSSL would ask whoever sits at the terminal."""
    raise ValueError(f"{flag}: {path} is encrypted; give a key that needs no password.")


def warn_of_readable(paths: Iterable[str | None]) -> None:
    """Of files with secrets that everybody on this machine may read."""
    for path in paths:
        with contextlib.suppress(OSError):
            if path is not None and Path(path).stat().st_mode & stat.S_IROTH:
                log_event(logger, logging.WARNING, "Everybody on this machine can read a secret: chmod o-r", file=path)


def make_session(
    urls: Callable[[], Collection[str]], key: str | None = None, context: ssl.SSLContext | None = None
) -> aiohttp.ClientSession:
    """For asking the engines at `urls`, those of the moment (another object whenever they are others), which alone are
    shown `key`. It follows no redirect, which could lead anywhere, and keeps no cookie."""
    # No limit: engines are as many as were stated, and those that do not answer must not keep others waiting.
    connector = aiohttp.TCPConnector(ssl=context or True, limit=0)
    middlewares = () if key is None else (_ShowKey(urls, key),)
    watch = aiohttp.TraceConfig()
    watch.on_request_redirect.append(_refuse_redirect)
    return aiohttp.ClientSession(
        connector=connector, middlewares=middlewares, cookie_jar=aiohttp.DummyCookieJar(), trace_configs=[watch]
    )


async def _refuse_redirect(*_: object) -> NoReturn:
    raise aiohttp.ClientError("a redirect, which is not followed")


class _ShowKey:
    def __init__(self, urls: Callable[[], Collection[str]], key: str) -> None:
        self._urls = urls
        self._value = f"Bearer {key}"
        self._read: Collection[str] = ()
        self._origins: frozenset[URL] = frozenset()
        """Of the URLs read last. With every request, those of a thousand engines would take milliseconds."""

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        urls = self._urls()
        if urls is not self._read:
            self._read, self._origins = urls, frozenset(URL(url).origin() for url in urls)
        if request.url.origin() in self._origins:
            request.headers["Authorization"] = self._value
        return await handler(request)
