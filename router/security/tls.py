"""TLS towards clients."""

from __future__ import annotations

import logging
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from publishers.credentials import load_authorities, load_pair
from publishers.logs import Seldom, log_event
from router.settings import Settings

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a client may take to agree on TLS."""

_DATES = {9: "is not valid yet", 10: "has expired"}
"""By OpenSSL's numbers: X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED."""


def front_context(settings: Settings) -> ssl.SSLContext | None:
    """With the files as they are now; None where the router serves plain HTTP. Raises ValueError."""
    if settings.tls_cert is None and settings.tls_key is None:
        if settings.tls_client_ca is not None:
            raise ValueError(
                "--tls-client-ca needs --tls-cert and --tls-key: only over TLS do clients show certificates."
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_pair(context, ("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key))
    if settings.tls_client_ca is not None:
        load_authorities(context, "--tls-client-ca", settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def warn_of_dates(shown: ssl.SSLContext, cert: str) -> None:
    """Of a certificate that clients will not take, since its time is over or has not come. `cert`: the file that
    `shown` has it from."""
    if trouble := _DATES.get(_complaint(shown, cert)):
        log_event(logger, logging.WARNING, f"The certificate of --tls-cert {trouble}", file=cert)


def _complaint(shown: ssl.SSLContext, cert: str) -> int:
    """OpenSSL's number for what a client minds that trusts just this certificate; 0 for nothing."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    asked, told = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        client.load_verify_locations(cert)
        asks, answers = client.wrap_bio(told, asked), shown.wrap_bio(asked, told, server_side=True)
        for side in (asks, answers, asks):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_code
    except OSError:  # whatever else is wrong with it is not what is asked here
        return 0
    return 0


class FailedHandshakes:
    """Counts and logs what asyncio passes over in silence: clients that did not come to terms on TLS."""

    def __init__(self, refused: Counter[str], clock: Callable[[], float]) -> None:
        """`refused`: by cause, as in `router.http.clients`. `clock`: seconds that do not go back."""
        self._refused = refused
        self._clock = clock
        self._lines = Seldom()

    def watch(self, context: ssl.SSLContext) -> None:
        """From now on those of `context` are counted."""
        note = self._note

        class Watched(ssl.SSLObject):
            def do_handshake(self) -> None:
                try:
                    super().do_handshake()
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise
                except ssl.SSLError as error:
                    note(error)
                    raise

        context.sslobject_class = Watched

    def _note(self, error: ssl.SSLError) -> None:
        self._refused["tls_handshake"] += 1
        now = self._clock()
        if self._lines.may(now):
            self._lines.said(now)
            reason = error.reason or str(error)
            log_event(logger, logging.WARNING, "A client and the router could not agree on TLS", reason=reason)
