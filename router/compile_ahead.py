"""`kv-router compile`: compiles what a first start would, such as while a container's image is built."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time

import router.scheduling.warm_up
from engines.command_line import Parser
from indexer.jit import all_kept
from router.processes.member import Member, Shared, memory_size, share
from router.scheduling.backlog import Backlog
from router.scheduling.balance import LeastLoaded
from router.scheduling.load import LoadBook
from router.scheduling.scheduler import Scheduler
from router.tokens import read_ids
from router.warm_up import warm_up

_DESCRIPTION = """\
Compiles now what a first start would, for every mode and for kv-publisher. The result is kept next to the package, in
the user's cache folder, or in NUMBA_CACHE_DIR. Starts use it on processors of the same model only, or on all of the
same architecture with NUMBA_CPU_NAME=generic, set here and for those starts."""


def main(argv: list[str]) -> int:
    """Returns the exit status: 1 if nothing can be kept."""
    make_parser().parse_args(argv)
    start = time.monotonic()
    if all_kept():
        _compile()
    if not all_kept():
        sys.stderr.write("kv-router compile: it cannot be kept; set NUMBA_CACHE_DIR to a folder with room.\n")
        return 1
    sys.stdout.write(f"Compiled in {time.monotonic() - start:.1f} s.\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    return Parser(prog="kv-router compile", description=_DESCRIPTION, allow_abbrev=False)


def _compile() -> None:
    warm_up(_scheduler(LoadBook(), Backlog()), with_store=True)
    shared = _shared()
    router.scheduling.warm_up.warm_up(_scheduler(LoadBook(shared.load), Backlog(shared.backlog)))
    read_ids(b"[1]")


def _scheduler(book: LoadBook, backlog: Backlog) -> Scheduler:
    return Scheduler(LeastLoaded(), book, random.Random(0), backlog)  # noqa: S311 -- not for secrets


def _shared() -> Shared:
    """As one of several processes has it: arrays with gaps are another type to the compiler."""
    with tempfile.TemporaryFile() as memory:
        memory.truncate(memory_size(2, 2))
        return share(Member(number=0, count=2, columns=2, memory=memory.fileno(), folder=""))
