"""Reads a model's config.json, if it is on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engines.answers import UNDECODABLE
from engines.description import bases
from engines.store import bytes_per_token
from router.model_folder import holds, may_read
from router.workers.worker import Worker

_KNOWN_DTYPES = frozenset({None, "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"})
"""The `--kv-cache-dtype`s whose size is known; others have layouts of their own."""


def read_config(root: str | None, folders: Sequence[str] = ()) -> dict[str, Any]:
    """{} if there is none. `folders`: `--model-folder`."""
    if root is None or not may_read(root, folders) or not holds(Path(root), "config.json"):
        return {}
    try:
        config = msgspec.json.decode((Path(root) / "config.json").read_bytes())
    except (OSError, *UNDECODABLE):
        return {}
    return config if isinstance(config, dict) else {}


def block_bytes(worker: Worker, folders: Sequence[str] = ()) -> int | None:
    """The size of one block, all layers on all ranks together. None if it cannot be known; it is not guessed."""
    dtype = worker.description.kv_dtype if worker.description else None
    base = bases(worker.models)
    if dtype not in _KNOWN_DTYPES or len(base) != 1:
        return None
    token = bytes_per_token(read_config(base[0].root, folders), None if dtype == "auto" else dtype)
    return token * worker.block_size if token else None
