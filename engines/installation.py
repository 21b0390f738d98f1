"""Says what is missing where a program is run by a Python that it is not installed for. Must not import what may be
missing."""

from __future__ import annotations

import sys

_OWN = ("engines", "indexer", "publishers", "router")


def explain(program: str, missing: ModuleNotFoundError) -> int:
    """Returns the exit status. Raises `missing` again if it is a module of this project."""
    module = missing.name or ""
    if module.partition(".")[0] in _OWN:
        raise missing
    sys.stderr.write(
        f"{program}: {sys.executable} has no module {module}. Install the router for it with 'pip install .', "
        "or use the Python of the virtual environment where it is installed.\n"
    )
    return 1
