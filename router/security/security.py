"""All security settings together, with the files that they name; these can be read again."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable
from functools import partial

import aiohttp

from publishers.connect import make_plane
from publishers.credentials import NatsFiles, warn_of_readable
from publishers.pipes import refuse_pipes
from publishers.plane import EventPlane
from router.http.messages import (
    API_KEY,
    AUTHORIZATION,
    REQUEST_HEADERS,
    RESPONSE_HEADERS,
    TRACEPARENT,
    TRACESTATE,
    VIA,
    Passing,
    header_lines,
)
from router.http.origins import Origins
from router.security.guard import Denied, Guard
from router.security.keys import Keys, read_keys
from router.security.newest import newest_from
from router.security.tls import front_context, warn_of_dates
from router.security.worker_access import read_access, worker_context
from router.settings import Settings, SettingsError, options
from router.workers.fleet import Fleet


class Security:
    """Raises SettingsError when made from what cannot be used."""

    def __init__(self, settings: Settings, clock: Callable[[], float], denied: Denied) -> None:
        """`denied` is told why a request was refused."""
        self._settings = settings
        try:
            self._load(settings, clock, denied)
        except ValueError as error:
            raise SettingsError(str(error)) from None

    def _load(self, settings: Settings, clock: Callable[[], float], denied: Denied) -> None:
        self.guard = _guard(settings, clock, denied)
        self.front = newest_from(front_context(settings))
        self.workers = read_access(settings)
        self.passing = self._passing()
        self.origins = Origins(settings.allowed_origin) if settings.allowed_origin else None
        self.answers_pass = RESPONSE_HEADERS | {name.encode() for name in settings.pass_header}
        self.make_plane()

    def _passing(self) -> Passing:
        """A client's own key goes to the workers only where nobody here has asked for it, nor has another for them.
        Raises ValueError."""
        if self.guard and API_KEY.decode() in self._settings.pass_header:
            raise ValueError(
                "--pass-header x-api-key: with --api-keys it holds clients' keys, which end at the router."
            )
        names = REQUEST_HEADERS | {VIA} | {name.encode() for name in self._settings.pass_header}
        if self._settings.otlp_traces_endpoint:  # workers get the router's span instead
            names -= {TRACEPARENT, TRACESTATE}
        router_id = secrets.token_hex(8).encode()
        via = header_lines([(VIA, router_id)])
        if self.workers.key is not None:
            return Passing(names, b"authorization: Bearer %s\r\n%s" % (self.workers.key.encode(), via), router_id)
        return Passing(names if self.guard else names | {AUTHORIZATION}, via, router_id)

    def make_plane(self) -> EventPlane:
        """Not yet started."""
        settings = self._settings
        files = NatsFiles(
            settings.nats_creds, settings.nats_nkey_seed, settings.nats_ca, settings.nats_cert, settings.nats_key
        )
        return make_plane(settings.event_plane, files)

    def make_session(self, fleet: Fleet) -> aiohttp.ClientSession:
        """For asking the workers, and what stands beside them."""
        return self.workers.session(lambda: fleet.urls)

    def warn(self) -> None:
        """Of files that others may read, and of a certificate that clients will not take, in the log."""
        s = self._settings
        if self.front and s.tls_cert:
            warn_of_dates(self.front.newest, s.tls_cert)
        warn_of_readable((s.tls_key, s.worker_key, s.nats_key, s.worker_api_key_file, s.nats_creds, s.nats_nkey_seed))

    def read_again(self) -> Callable[[], None]:
        """Reads clients' keys and the certificates as they are now; what is returned puts them in force. Raises
        SettingsError."""
        try:
            keys = read_keys(self._settings.api_keys) if self._settings.api_keys else None
            front = front_context(self._settings)
            workers = worker_context(self._settings)
        except ValueError as error:
            raise SettingsError(str(error)) from None
        if front and self._settings.tls_cert:
            warn_of_dates(front, self._settings.tls_cert)
        return partial(self._take, keys, front, workers)

    def _take(self, keys: Keys | None, front: ssl.SSLContext | None, workers: ssl.SSLContext | None) -> None:
        if self.front and front:
            self.front.newest = front
        if self.workers.context and workers:
            self.workers.context.newest = workers
        if self.guard and keys:
            self.guard.take(keys)


def _guard(settings: Settings, clock: Callable[[], float], denied: Denied) -> Guard | None:
    if settings.api_keys is None:
        return None
    return Guard(read_keys(settings.api_keys), settings.protect_metrics, clock, denied)


def check_security(settings: Settings) -> None:
    """Raises SettingsError."""
    named = ((option.flag, getattr(settings, option.attribute)) for option in options() if option.group == "Security")
    try:
        refuse_pipes((flag, path) for flag, path in named if isinstance(path, str))
    except ValueError as error:
        raise SettingsError(str(error)) from None
    Security(settings, lambda: 0.0, lambda _: None)
