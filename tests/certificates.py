"""Certificates made for a test: an authority, and what it signs, as files."""

from __future__ import annotations

import ssl
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import trustme

Dates = tuple[datetime | None, datetime | None]


class Pair(NamedTuple):
    cert: str
    key: str


class Authority:
    """Signs for names; each thing asked for is a PEM file in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.file = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def pair(
        self,
        name: str,
        file: str = "server",
        kind: trustme.KeyType = trustme.KeyType.ECDSA,
        dates: Dates = (None, None),
    ) -> Pair:
        """For `name`, a host or an address; `kind` of its key. `dates`: its first and last, else trustme's."""
        made = self._ca.issue_cert(name, key_type=kind, not_before=dates[0], not_after=dates[1])
        cert, key = (str(self._folder / f"{file}.{part}") for part in ("crt", "key"))
        for number, blob in enumerate(made.cert_chain_pems):
            blob.write_to_path(cert, append=number > 0)
        made.private_key_pem.write_to_path(key)
        Path(key).chmod(0o600)
        return Pair(cert, key)

    def client(self, shows: Pair | None = None) -> ssl.SSLContext:
        """Trusts this authority alone."""
        context = ssl.create_default_context(cafile=self.file)
        if shows:
            context.load_cert_chain(*shows)
        return context

    def server(self, pair: Pair, clients: Authority | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*pair)
        if clients:
            context.load_verify_locations(clients.file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
