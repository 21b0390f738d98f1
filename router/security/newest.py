"""TLS with certificates that are read again while connections are made."""

from __future__ import annotations

import ssl


class Newest(ssl.SSLContext):
    """Each connection is made by the newest of several contexts. One that is loaded again would not do: it keeps a
    certificate for each kind of key, and may go on showing the old one; and it keeps all authorities."""

    newest: ssl.SSLContext

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        self.newest.sslobject_class = self.sslobject_class
        return self.newest.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def newest_from(first: ssl.SSLContext | None) -> Newest | None:
    if first is None:
        return None
    made = Newest(first.protocol)
    made.newest = first
    return made
