"""Where the engines' environments live: outside the repository, shared by every clone of it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent


def engines_folder() -> Path:
    if chosen := os.environ.get("KV_ROUTER_ENGINES"):
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kv-router-engines"


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """The engines' folder, with `name` in it ours until the end: two clones may install at once."""
    folder = engines_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.busy").open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        yield folder
