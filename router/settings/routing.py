"""How a worker is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from router.arm_spec import read_arms
from router.settings.options import Above0, about, memory, read_header, read_none, seconds, seconds_or_none

RouterMode = Literal["kv", "round-robin", "random", "least-loaded", "power-of-two", "direct"]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""With more, costs would come near to what numbers can be."""


def _check_arms(value: object) -> object:
    """As it is; ValueError when it is text that names no arms."""
    if isinstance(value, str) and value != "none":
        read_arms(value)
    return read_none(value)


@dataclass(frozen=True, kw_only=True)
class Routing:
    router_mode: Annotated[
        RouterMode,
        about(
            "Routing",
            "How a worker is chosen. kv weighs cached prefixes against load; direct uses the worker that the request "
            "names.",
        ),
    ] = "kv"
    kv_policy: Annotated[
        str,
        about(
            "Routing",
            "The cost by which workers are compared in kv mode: auto (predicted seconds; requests are held in the "
            "router until their worker is ready), overlap (weighted sum of prefill and decode tokens), lmetric "
            "(prefill tokens times batch size), ttft (predicted time to first token), or the name of an installed "
            "policy.",
            "POLICY",
            pattern=r"^[A-Za-z0-9_.-]+\Z",
            takes="auto, overlap, lmetric, ttft, or the name of an installed policy",
        ),
    ] = "auto"
    kv_overlap_score_weight: Annotated[
        Weight | None,
        about(
            "Routing",
            "Weight of prefill work relative to decode load; 0 balances load only. Setting it selects the policy "
            "overlap.",
            "WEIGHT",
            takes="a number from 0 to 1e9, or none",
            read=read_none,
        ),
    ] = None
    router_temperature: Annotated[
        float,
        about(
            "Routing",
            "Randomness of the choice in kv mode: a worker whose cost is higher by the prefill of the whole prompt is "
            "chosen exp(-1/TEMPERATURE) times as often; 0 takes the lowest cost and breaks ties at random.",
            "TEMPERATURE",
            ge=0,
        ),
    ] = 0.0
    ttft_slo: Annotated[
        Above0 | None,
        seconds_or_none(
            "Routing",
            "Objective for the time to first token, in kv mode: a request for which a longer one is predicted is "
            "refused with 429, or held (--slo-action).",
        ),
    ] = None
    tbt_slo: Annotated[
        Above0 | None,
        seconds_or_none(
            "Routing",
            "Objective for the time between two tokens, in kv mode: a request for which a longer one is predicted "
            "is refused with 429, or held (--slo-action).",
        ),
    ] = None
    slo_action: Annotated[
        Literal["reject", "queue"],
        about(
            "Routing",
            "What happens to a request that would miss an objective: reject refuses it at once; queue holds it in the "
            "router until it would meet the objective, with times counted from when it is sent to a worker.",
        ),
    ] = "reject"
    slo_patience: Annotated[
        float, seconds("Routing", "How long --slo-action queue holds a request before it is refused.")
    ] = 10.0
    ab: Annotated[
        str | None,
        about(
            "Routing",
            "Live comparison: completions and chats are split between arms in proportion to their weights. An arm is "
            "a mode or kv/POLICY. Other requests use --router-mode.",
            "ARM:WEIGHT,ARM:WEIGHT[,...]",
            takes="arms with weights such as kv:90,round-robin:10, or none",
            read=_check_arms,
        ),
    ] = None
    ab_sticky: Annotated[
        str | None,
        about(
            "Routing",
            "Requests with the same value of this header go to the same arm of --ab. Without this flag or the header, "
            "each goes to one at random.",
            "HEADER",
            takes="a header's name such as x-session-id, or none",
            read=read_header,
        ),
    ] = None
    kv_events: Annotated[
        bool,
        about(
            "Routing",
            "Learn from KV events what each worker holds, if --router-mode or an arm of --ab is kv; without events, "
            "predict it from what was sent to the worker.",
        ),
    ] = True
    approx_ttl: Annotated[
        float,
        seconds(
            "Routing",
            "How long a block counts as held by the worker that it was sent to, if that worker reports neither KV "
            "events nor the size of its cache.",
        ),
    ] = 120.0
    index_max_memory: Annotated[
        int,
        memory(
            "Routing",
            "Most memory that the index of each process takes; beyond it, the least recently used blocks are "
            "forgotten.",
        ),
    ] = 4 * 1024**3
    seed: Annotated[
        int | None,
        about("Routing", "Makes random choices repeatable.", "NUMBER", takes="a whole number, or none", read=read_none),
    ] = None
