"""Stated flags that do nothing beside the others. They are no error: modes are compared by changing the mode alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from router.arms import reads_engine_events, reads_prompts
from router.settings import Settings

_ONLY_KV: Final = "only --router-mode kv heeds it"
_NO_ARM: Final = "only an arm of mode kv heeds it, and --ab has none"
_STAYS: Final = "with --router-mode direct each request names its worker, and no other continues it"
_KEYS: Final = "with --api-keys each key names its tenant"
_NO_TOKENS: Final = "with --tokenizer engine the router makes no tokens that it could send"
_PATIENCE: Final = "only --slo-action queue holds requests that would miss an objective"
_HELD: Final = "--queue-timeout ends what it would hold before"
_BUFFERED: Final = "--max-buffered is less, and no larger body is taken"
_NAMESPACE: Final = "with --event-plane local there is no broker that others share"
_EVENT_HOST: Final = "with a broker, publishers read the engines' events, and take an --event-host each"
_NO_TLS: Final = "no worker's URL begins with https://"
_NO_EVENTS: Final = "the router reads no KV events, which only mode kv needs, and not with --no-kv-events"


def unheeded(settings: Settings) -> dict[str, str]:
    """Each such flag, and why."""
    return {flag: why for flag, why in (*_by_mode(settings), *_by_others(settings)) if why is not None}


def _by_mode(settings: Settings) -> Iterator[tuple[str, str | None]]:
    """None: it is heeded, or not stated."""
    reads = reads_prompts(settings)
    by_kv = settings.router_mode == "kv" or reads
    yield "--kv-policy", _ONLY_KV if settings.kv_policy != "auto" and not by_kv else None
    yield "--kv-overlap-score-weight", _ONLY_KV if settings.kv_overlap_score_weight is not None and not by_kv else None
    yield "--router-temperature", _ONLY_KV if settings.router_temperature and not by_kv else None
    unread = _NO_ARM if by_kv else _ONLY_KV
    yield "--tokenizer", unread if settings.tokenizer != "auto" and not reads else None
    yield "--approx-ttl", unread if settings.approx_ttl != Settings.approx_ttl and not reads else None
    yield "--index-max-memory", unread if settings.index_max_memory != Settings.index_max_memory and not reads else None
    stays = settings.router_mode == "direct"
    yield "--migration-limit", _STAYS if settings.migration_limit and stays else None


def _by_others(settings: Settings) -> Iterator[tuple[str, str | None]]:
    s, is_local = settings, settings.event_plane == "local"
    yield "--tenant-header", _KEYS if s.tenant_header and s.api_keys else None
    yield "--send-token-ids", _NO_TOKENS if s.send_token_ids and s.tokenizer == "engine" else None
    if s.slo_patience != Settings.slo_patience:
        held = _HELD if s.slo_patience > s.queue_timeout else None
        yield "--slo-patience", held if s.slo_action == "queue" else _PATIENCE
    stated = s.max_body_size != Settings.max_body_size
    yield "--max-body-size", _BUFFERED if stated and s.max_body_size > s.max_buffered else None
    yield "--event-namespace", _NAMESPACE if s.event_namespace != Settings.event_namespace and is_local else None
    yield "--event-host", _EVENT_HOST if s.event_host and not is_local else None
    told = any(worker.events or worker.replay for worker in s.workers)
    yield "--worker …,events=", _NO_EVENTS if told and is_local and not reads_engine_events(s) else None
    plain = not s.admin_listen and not any(url.startswith("https:") for url in _asked(s))
    yield "--worker-ca", _NO_TLS if s.worker_ca and plain else None
    yield "--worker-cert", _NO_TLS if s.worker_cert and plain else None


def _asked(settings: Settings) -> Iterator[str]:
    """The URLs for which `--worker-ca` and `--worker-cert` are."""
    yield from (worker.url for worker in settings.workers)
    if settings.store:
        yield settings.store.url
