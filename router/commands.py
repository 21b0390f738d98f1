"""What `kv-router` can do: serve, or a command: `ab`, `compile`, `keys`, `simulate`, `store`."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable
from logging.handlers import MemoryHandler
from typing import TypeVar, cast

from publishers.logs import configure_logging
from publishers.streams import leads_nowhere, lose_output
from router.cli import Source
from router.early_signals import hold_hangups
from router.open_files import raise_limit
from router.settings import Settings, SettingsError

_T = TypeVar("_T")
COMMANDS = {
    "ab": "router.ab.cli",
    "compile": "router.compile_ahead",
    "keys": "router.security.cli",
    "simulate": "router.simulation.cli",
    "store": "router.store_cli.cli",
}


def run(arguments: list[str]) -> int:
    """Returns the process's exit status: 2 for settings that cannot be used."""
    if arguments and arguments[0] in COMMANDS:
        other = cast("Callable[[list[str]], int]", importlib.import_module(COMMANDS[arguments[0]]).main)
        try:
            return _shown(lambda: other(arguments[1:]))
        except OSError as error:
            return _lost(f"kv-router {arguments[0]}", error)
    hold_hangups()
    source = Source(arguments, os.environ)
    try:
        settings = _read(source)
    except SettingsError as error:
        print(f"kv-router: {error}", file=sys.stderr)  # noqa: T201 - there are no logs before settings
        return 2
    except OSError as error:
        return _lost("kv-router", error)
    raise_limit()
    # Imported late: --help and mistakes are answered without loading the server.
    module = "router.serve" if settings.processes == 1 else "router.processes.parent"
    serve = cast("Callable[[Settings, Source], int]", importlib.import_module(module).run)
    gc.freeze()  # modules stay: collecting them would be most of the work of a router that ends at once
    return serve(settings, source)


def _shown(command: Callable[[], int]) -> int:
    """The exit status of a command. Raises OSError if it did well, and had nobody to tell what it found."""
    status = _or_help(command)
    if status == 0:
        _check_shown()
    return status


def _or_help(ask: Callable[[], _T]) -> _T:
    """What is asked for; with --help or --version it raises SystemExit, or OSError as above."""
    try:
        return ask()
    except SystemExit as ended:
        if ended.code == 0:
            _check_shown()
        raise


def _check_shown() -> None:
    if leads_nowhere(sys.stdout):
        raise OSError("standard output is closed, and what was to be shown there lost")
    sys.stdout.flush()


def _lost(name: str, error: OSError) -> int:
    """The exit status where standard output is full or closed: of all else is told where it is met with."""
    lose_output()
    sys.stderr.write(f"{name}: {error.strerror or error}\n")
    return 1


def _read(source: Source) -> Settings:
    """Read the settings. Its warnings are held back until they have said how to write logs."""
    root, early = logging.getLogger(), MemoryHandler(sys.maxsize)
    root.addHandler(early)
    try:
        settings = _or_help(source.read)
        if early.buffer:
            configure_logging(settings.log_level, settings.log_format)
    finally:
        root.removeHandler(early)
        for record in early.buffer:
            if root.isEnabledFor(record.levelno):
                root.handle(record)
    return settings
