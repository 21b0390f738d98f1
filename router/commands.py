"""What `kv-router` can do: serve, or a command: `ab`, `simulate`, `store`, `keys`."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable
from logging.handlers import MemoryHandler
from typing import cast

from publishers.early_ending import end_at_sigterm
from publishers.logs import configure_logging
from publishers.streams import leads_nowhere, lose_output
from router.cli import Source
from router.early_signals import hold_hangups
from router.open_files import raise_limit
from router.settings import Settings, SettingsError

COMMANDS = {
    "ab": "router.ab.cli",
    "keys": "router.security.cli",
    "simulate": "router.simulation.cli",
    "store": "router.store_cli.cli",
}


def run(arguments: list[str]) -> int:
    """Returns the process's exit status: 2 for settings that cannot be used."""
    if arguments and arguments[0] in COMMANDS:
        other = cast("Callable[[list[str]], int]", importlib.import_module(COMMANDS[arguments[0]]).main)
        try:
            return _told(other(arguments[1:]))
        except OSError as error:  # standard output is full or closed; they tell of all else themselves
            lose_output()
            sys.stderr.write(f"kv-router {arguments[0]}: {error.strerror or error}\n")
            return 1
    end_at_sigterm()
    hold_hangups()
    source = Source(arguments, os.environ)
    try:
        settings = _read(source)
    except SettingsError as error:
        print(f"kv-router: {error}", file=sys.stderr)  # noqa: T201 - there are no logs before settings
        return 2
    raise_limit()
    # Imported late: --help and mistakes are answered without loading the server.
    module = "router.serve" if settings.processes == 1 else "router.processes.parent"
    serve = cast("Callable[[Settings, Source], int]", importlib.import_module(module).run)
    gc.freeze()  # modules stay: collecting them would be most of the work of a router that ends at once
    return serve(settings, source)


def _told(status: int) -> int:
    """The exit status of a command. Raises OSError if it did well, and had nobody to tell what it found."""
    if status == 0 and leads_nowhere(sys.stdout):
        raise OSError("standard output is closed, and what was to be shown there lost")
    return status


def _read(source: Source) -> Settings:
    """Read the settings. Its warnings are held back until they have said how to write logs."""
    root, early = logging.getLogger(), MemoryHandler(sys.maxsize)
    root.addHandler(early)
    try:
        settings = source.read()
        if early.buffer:
            configure_logging(settings.log_level, settings.log_format)
    finally:
        root.removeHandler(early)
        for record in early.buffer:
            if root.isEnabledFor(record.levelno):
                root.handle(record)
    return settings
