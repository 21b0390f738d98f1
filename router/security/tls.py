"""TLS towards clients."""

from __future__ import annotations

import ssl

from publishers.credentials import load_authorities, load_pair
from router.settings import Settings

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a client may take to agree on TLS."""


def front_context(settings: Settings) -> ssl.SSLContext | None:
    """None where the router serves plain HTTP. Raises ValueError."""
    if settings.tls_cert is None and settings.tls_key is None:
        if settings.tls_client_ca is not None:
            raise ValueError(
                "--tls-client-ca needs --tls-cert and --tls-key: only over TLS do clients show certificates."
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_front(context, settings)
    if settings.tls_client_ca is not None:
        load_authorities(context, "--tls-client-ca", settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_front(context: ssl.SSLContext, settings: Settings) -> None:
    """The certificate as it is now, for the connections to come. Raises ValueError."""
    load_pair(context, ("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key))
