"""How engines are asked that want a key, or speak TLS: by the router's own flags."""

from __future__ import annotations

from router.ab.errors import RunError
from router.ab.plan import Plan
from router.security import worker_access
from router.security.worker_access import WorkerAccess

_FILES = ("worker_api_key_file", "worker_ca", "worker_cert", "worker_key")


def read_access(plan: Plan) -> WorkerAccess:
    """Raises RunError for a file that cannot be used."""
    try:
        return worker_access.read_access(plan)
    except ValueError as error:
        raise RunError(str(error)) from None


def router_flags(plan: Plan) -> list[str]:
    """The same, for the router that a mode starts."""
    given = [("--" + name.replace("_", "-"), getattr(plan, name)) for name in _FILES]
    return [part for flag, path in given if path is not None for part in (flag, path)]
