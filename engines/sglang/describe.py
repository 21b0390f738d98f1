"""What SGLang is, by its answers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from engines import problems
from engines.answers import items, mapping, parse, text, whole
from engines.description import MOST_RANKS, EngineDescription, EventSource, Model, Role, bases
from engines.endpoints import reachable, tcp
from engines.versions import Version, is_before

_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "null": "both"}
"""By `--disaggregation-mode`."""

_PREFIX_EVENTS: Version = (0, 5, 6)
"""Before this version blocks were hashed by their own tokens alone, and the first block of every radix node was told as
the beginning of a prompt (mem_cache/radix_cache.py): an index of these would find prefixes that nobody holds."""
_HIERARCHICAL_EVENTS: Version = (0, 5, 10)
"""Before this version a hierarchical cache published no blocks at all (mem_cache/hiradix_cache.py)."""
_TAKES_RANK: Version = (0, 5, 10)
"""The first version that reads X-Data-Parallel-Rank (entrypoints/openai/serving_base.py)."""


def describe(host: str, models: tuple[Model, ...], info: object, model_info: object) -> EngineDescription:
    """From GET /server_info and, for the tokenizer, /model_info, as JSON values (None: it has none)."""
    server = mapping(info)
    events = mapping(server.get("kv_events"))
    page_size = whole(server.get("page_size"), 1)
    block_size = whole(events.get("block_size"), 1) or page_size
    dp_size = min(whole(events.get("dp_size"), 1) or whole(server.get("dp_size"), 1) or 1, MOST_RANKS)
    event_sources, found = _event_sources(host, server, dp_size)
    if block_size is None:
        found = (*found, problems.NO_BLOCK_SIZE)
    if dp_size > 1 and is_before(text(server.get("version")), _TAKES_RANK):
        found = (*found, problems.OWN_RANK)
    tokens = whole(server.get("max_total_num_tokens"), 1)
    return EngineDescription(
        kind="sglang",
        version=text(server.get("version")),
        models=with_adapters(models),
        block_size=block_size,
        dp_size=dp_size,
        event_sources=event_sources,
        total_blocks=tokens // block_size if tokens and block_size else None,
        kv_dtype=text(server.get("kv_cache_dtype")),
        max_running=_max_running(server, dp_size),
        max_loras=whole(server.get("max_loras_per_batch"), 1) if _has_adapters(server) else None,
        tokenizer_path=_tokenizer_path(server, mapping(model_info), models),
        keeps_prefixes=server.get("disable_radix_cache") is not True,
        cuts_prompts=server.get("allow_auto_truncate") is True,
        role=_ROLES.get(text(server.get("disaggregation_mode")) or ""),
        bootstrap_port=whole(server.get("disaggregation_bootstrap_port"), 1),
        problems=found,
    )


def with_adapters(models: tuple[Model, ...]) -> tuple[Model, ...]:
    """`models` with the adapters under the names by which SGLang uses them (0.5.5,
    entrypoints/openai/serving_base.py). Its own list has their bare names, for which it uses the base model."""
    return tuple(replace(model, id=f"{model.parent}:{model.id}") if model.parent else model for model in models)


def names_tokenizer(info: object) -> bool:
    """Whether /server_info needs no /model_info beside it."""
    return text(mapping(info).get("tokenizer_path")) is not None


def _tokenizer_path(server: dict[str, Any], model_info: dict[str, Any], models: tuple[Model, ...]) -> str | None:
    stated = (place.get(key) for key in ("tokenizer_path", "model_path") for place in (server, model_info))
    roots = (model.root for model in bases(models))
    return next((path for path in (*stated, *roots) if isinstance(path, str) and path), None)


def _max_running(server: dict[str, Any], dp_size: int) -> int | None:
    """Each rank's own limit where it is stated; `max_running_requests` is for all ranks together."""
    states = [mapping(state) for state in items(server.get("internal_states"))]
    limits = [whole(state.get("effective_max_running_requests_per_dp"), 1) for state in states]
    known = [limit for limit in limits if limit is not None]
    if known:
        return min(known)
    together = whole(server.get("max_running_requests"), 1)
    return None if together is None else max(1, together // dp_size)


def _has_adapters(server: dict[str, Any]) -> bool:
    """Whether it was started for adapters; the limit has a default all the same."""
    return bool(server.get("enable_lora") or server.get("lora_paths"))


def _event_sources(host: str, server: dict[str, Any], dp_size: int) -> tuple[tuple[EventSource, ...], tuple[str, ...]]:
    """The structured `kv_events` where there is one, else the launch flag's JSON text."""
    described = mapping(server.get("kv_events"))
    config = mapping(parse(text(server.get("kv_events_config")) or "null"))
    if "zmq" not in (described.get("publisher"), config.get("publisher")):
        return (), (problems.EVENTS_OFF,)
    if is_before(text(server.get("version")), _telling_since(server)):
        return (), (problems.OLD_EVENTS,)
    ranks = (_event_source(host, described, config, rank) for rank in range(dp_size))
    found = tuple(source for source in ranks if source is not None)
    if len(found) < dp_size:
        return (), (problems.BAD_ENDPOINT,)
    return found, () if all(source.replay for source in found) else (problems.NO_REPLAY,)


def _telling_since(server: dict[str, Any]) -> Version:
    return _HIERARCHICAL_EVENTS if server.get("enable_hierarchical_cache") is True else _PREFIX_EVENTS


def _event_source(host: str, described: dict[str, Any], config: dict[str, Any], rank: int) -> EventSource | None:
    """A rank's ports are the base ports + its number."""
    stated_host = text(described.get("endpoint_host")) or "*"
    port, replay_port = (
        whole(described.get("endpoint_port_base"), 1),
        whole(described.get("replay_endpoint_port_base"), 1),
    )
    endpoint = tcp(stated_host, port + rank, host) if port else reachable(text(config.get("endpoint")), host, rank)
    if endpoint is None:
        return None
    replay = (
        tcp(stated_host, replay_port + rank, host)
        if replay_port  # 0.5.18 states it in the launch flag only
        else reachable(text(config.get("replay_endpoint")), host, rank)
    )
    return EventSource(rank, endpoint, replay, text(described.get("topic")) or text(config.get("topic")) or "")
