"""Key files as tests need them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.raw_client import get, post


def write_keys(folder: Path, *entries: dict[str, Any]) -> str:
    """A file of entries, each with `key` in place of its digest. Returns its path."""
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump([_entry(**entry) for entry in entries]))
    return str(path)


def _entry(key: str, **fields: Any) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}


def bearer(key: str) -> bytes:
    return b"Authorization: Bearer " + key.encode()


def ask_with(key: str, body: bytes = b'{"prompt":"x"}', path: str = "/v1/completions") -> bytes:
    return post(path, body, bearer(key), b"content-type: application/json")


def get_with(key: str, path: str) -> bytes:
    return get(path, bearer(key))
