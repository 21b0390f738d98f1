"""Whether what every request passes runs compiled (docs/adr/0008-compiled-modules.md)."""

from __future__ import annotations

import importlib.util


def is_compiled() -> bool:
    spec = importlib.util.find_spec("router.exchange")
    return spec is not None and not str(spec.origin).endswith(".py")
