"""`--flags FILE`: flags of `simulate` in YAML, by their names without the dashes, for runs that are to be repeated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from router.ab.errors import RunError
from router.ab.flags import Parser
from router.yaml_text import NotYaml, read_yaml

_REPEATED = frozenset({"slow", "change"})
"""They take one at a time."""


def with_flags_file(argv: Sequence[str], every: Parser) -> list[str]:
    """What the file says, then the command line, which wins. `every`: knows all flags. RunError for a file that cannot
    be used."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--flags")
    try:
        path = parser.parse_known_args(argv)[0].flags
    except argparse.ArgumentError:
        return list(argv)  # the whole command line's reader will say what is wrong
    return list(argv) if path is None else [*_read(Path(path), every), *argv]


def _read(path: Path, every: Parser) -> list[str]:
    try:
        content = read_yaml(path.read_text("utf-8"))
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; give another FILE to --flags") from None
    except UnicodeDecodeError:
        raise RunError(f"{path} is not a text file") from None
    except NotYaml as error:
        raise RunError(f"{path} is not valid YAML{error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} must map flags to values, as in workers: 8")
    flags = [part for name, value in content.items() for part in _flag(path, name, value)]
    try:
        every.parse_args(flags)
        for name in (name for name, value in content.items() if value is False):
            every.parse_args([f"--{name}"])  # nothing is left of it, but a flag that there is not would go unnoticed
    except RunError as error:  # among the command line's flags nothing would tell that it is the file's
        raise RunError(f"{path}: {error}") from None
    return flags


def _flag(path: Path, name: object, value: object) -> list[str]:
    """`true` is a flag without a value, `false` none; a list is written with commas, or as a flag for each."""
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    if isinstance(value, list) and name in _REPEATED:
        return [part for one in value for part in _flag(path, name, one)]
    if isinstance(value, list):
        return [f"--{name}", ",".join(map(str, value))]
    if not isinstance(value, str | int | float) or name == "flags":
        raise RunError(f"{path}: {name} must be a flag's value, not {value!r}")
    return [f"--{name}", str(value)]
