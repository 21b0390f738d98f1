"""Stated flags that do nothing beside the others. They are no error: modes are compared by changing the mode alone."""

from __future__ import annotations

from typing import Final

from router.arms import reads_prompts
from router.settings import Settings

_ONLY_KV: Final = "only --router-mode kv heeds it"
_KEYS: Final = "with --api-keys each key names its tenant"


def unheeded(settings: Settings) -> dict[str, str]:
    """Each such flag, and why."""
    by_kv = settings.router_mode == "kv" or reads_prompts(settings)
    reasons = {
        "--kv-policy": _ONLY_KV if settings.kv_policy != "auto" and not by_kv else None,
        "--kv-overlap-score-weight": _ONLY_KV if settings.kv_overlap_score_weight is not None and not by_kv else None,
        "--router-temperature": _ONLY_KV if settings.router_temperature and not by_kv else None,
        "--tenant-header": _KEYS if settings.tenant_header and settings.api_keys else None,
    }
    return {flag: why for flag, why in reasons.items() if why is not None}
