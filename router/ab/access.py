"""How engines are asked that want a key, or speak TLS: by the router's own flags."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp

from publishers.credentials import client_context, make_session, read_key
from router.ab.errors import RunError
from router.ab.plan import Plan

_FLAGS = {
    "--worker-api-key-file": "worker_api_key_file",
    "--worker-ca": "worker_ca",
    "--worker-cert": "worker_cert",
    "--worker-key": "worker_key",
}


class Access(NamedTuple):
    key: str | None = None
    context: ssl.SSLContext | None = None
    """For `https://`; None: the system's authorities, and no certificate of ours."""

    def session(self, urls: Sequence[str]) -> aiohttp.ClientSession:
        """For asking the engines at `urls`."""
        return make_session(lambda: urls, self.key, self.context)


def read_access(plan: Plan) -> Access:
    """Raises RunError for a file that cannot be used."""
    try:
        context = client_context("--worker", plan.worker_ca, plan.worker_cert, plan.worker_key)
        path = plan.worker_api_key_file
        return Access(read_key("--worker-api-key-file", path) if path else None, context)
    except ValueError as error:
        raise RunError(str(error)) from None


def router_flags(plan: Plan) -> list[str]:
    """The same, for the router that a mode starts."""
    given = [(flag, getattr(plan, name)) for flag, name in _FLAGS.items()]
    return [part for flag, path in given if path is not None for part in (flag, path)]
