"""Every setting, once: flags, `ROUTER_*` variables, YAML keys, `--help` and the reference page are made from this.

A field's name is its key in YAML, unless it states another; flag and variable follow from the key. Each group
has a file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import get_args, get_type_hints

from router.settings.administration import Administration
from router.settings.events import Events
from router.settings.limits import Limits
from router.settings.logs import Logs
from router.settings.options import VARIABLE_PREFIX, Option, SettingsError
from router.settings.routing import RouterMode, Routing
from router.settings.security import Security
from router.settings.serving import Serving
from router.settings.tokens import Tokens
from router.settings.upstream import Upstream
from router.settings.workers import Workers

__all__ = ["GROUPS", "VARIABLE_PREFIX", "Option", "RouterMode", "Settings", "SettingsError", "options"]

_GROUPS = (Workers, Serving, Routing, Events, Tokens, Limits, Security, Upstream, Administration, Logs)
GROUPS = tuple(group.__name__ for group in _GROUPS)


@dataclass(frozen=True, kw_only=True)
class Settings(Logs, Administration, Upstream, Security, Limits, Tokens, Events, Routing, Serving, Workers):
    """What the router was told. Durations are in seconds, sizes in bytes."""


@cache
def options() -> tuple[Option, ...]:
    """Every setting in the order of its declaration."""
    hints = get_type_hints(Settings, include_extras=True)
    return tuple(_option(field.name, hints[field.name], field.default) for field in fields(Settings))


def _option(name: str, hint: object, default: object) -> Option:
    kind, meta = get_args(hint)
    return Option(name, meta.extra["key"] or name, kind, default, meta)
