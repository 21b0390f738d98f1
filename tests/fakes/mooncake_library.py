"""A module in place of Mooncake's client library: what is called there goes into a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import router

ROOT = Path(router.__file__).parents[1]
LIBRARY = """
import json, os, sys, time
class MooncakeDistributedStore:
    def setup(self, *args):
        print("chatter of the library")
        os.write(1, b"more of it\\n")
        self.log("setup", args)
        return SETUP
    def create_copy_task(self, key, segments):
        os.write(1, b"null\\n")
        self.log("copy", (key, segments))
        if key == "die": os._exit(3)
        if key == "hang": time.sleep(60)
        return (1, 2), -704 if key == "gone" else 0
    def close(self):
        self.log("close", ())
    def log(self, what, args):
        with open(LOG, "a") as file:
            file.write(json.dumps([what, args]) + "\\n")
"""


class Place:
    """Where the module is, and what was called there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "log"

    def write(self, setup: int = 0, text: str = LIBRARY) -> None:
        (self._folder / "mooncake").mkdir()
        (self._folder / "mooncake" / "__init__.py").touch()
        begin = f"SETUP, LOG = {setup}, {str(self._log)!r}\n"
        (self._folder / "mooncake" / "store.py").write_text(begin + text)

    @property
    def calls(self) -> list[tuple[str, list[object]]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [(what, args) for what, args in map(json.loads, lines)]


def place_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Children of this process find it there."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
    return Place(folder)
