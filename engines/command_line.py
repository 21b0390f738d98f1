"""What the command lines of all programs have in common."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and not beside it how else it could be used."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists every flag\n")


def version_of(program: str) -> str:
    """What `--version` says."""
    try:
        version = importlib.metadata.version("kv-aware-router")
    except importlib.metadata.PackageNotFoundError:
        version = "(run from a checkout, not installed)"
    return f"{program} {version}"
