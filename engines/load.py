"""How to ask an engine for its load, as a dialogue without I/O (see `engines.probe` for how to drive one)."""

from __future__ import annotations

from collections.abc import Generator

import engines.sglang.load
import engines.vllm.load
from engines.answers import read_json
from engines.description import EngineDescription
from engines.probe import Answer
from engines.rank_load import RankLoad

Poll = Generator[str, Answer, dict[int, RankLoad]]


def poll(description: EngineDescription) -> Poll:
    """By dp rank; empty when the engine does not answer, or is of a kind that is not known.

    One request where the engine answers in its usual way. Raises nothing, whatever comes back.
    """
    if description.kind == "vllm":
        metrics = yield "/metrics"
        return engines.vllm.load.read(metrics.body, description) if metrics.status == 200 else {}
    if description.kind == "sglang":
        return (yield from _sglang(description))
    return {}


def _sglang(description: EngineDescription) -> Poll:
    loads = yield "/v1/loads"
    found = engines.sglang.load.read_loads(read_json(loads), description)
    if found or loads.status <= 0:
        return found
    found = engines.sglang.load.read_get_load(read_json((yield "/get_load")), description)
    if found:
        return found
    metrics = yield "/metrics"
    return engines.sglang.load.read_metrics(metrics.body, description) if metrics.status == 200 else {}
