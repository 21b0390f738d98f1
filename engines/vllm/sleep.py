"""Whether a vLLM engine is put to sleep, or paused: it goes on answering /health, and computes nothing."""

from __future__ import annotations

from engines.answers import mapping, read_json

PATH = "/is_sleeping"
"""Only with VLLM_SERVER_DEV_MODE=1, as the paths that put it to sleep."""


def is_asleep(answer: tuple[int, bytes]) -> bool:
    """`answer`: to GET `PATH`, as status and body."""
    return mapping(read_json(answer)).get("is_sleeping") is True
