"""Who may use the admin surface."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from publishers.urls import is_loopback, split_url
from router.http.messages import Headers
from router.openai.errors import BadRequest
from router.security.guard import Guard


class Refusal(NamedTuple):
    status: int
    message: str
    """For people."""


Authorize = Callable[[Headers], Refusal | None]
"""From the headers, with names in lower case, to why not; None: go on."""


def by_keys(guard: Guard) -> Authorize:
    """Whoever shows a key with `admin: true`."""

    def authorize(headers: Headers) -> Refusal | None:
        try:
            guard.check_admin(headers)
        except BadRequest as error:
            return Refusal(error.response.status, str(error))
        return None

    return authorize


def refuse_foreign_host(host: str | None) -> Refusal | None:
    """A page from elsewhere may have its own name lead to this machine, and let a browser ask here (DNS rebinding):
    its requests still say that name in their Host header."""
    try:
        name = split_url(f"//{host}").hostname
    except ValueError:
        name = None
    if name and is_loopback(name):
        return None
    return Refusal(403, "Without keys this surface answers only where it is called by a loopback address or localhost.")
