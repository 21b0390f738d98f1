"""Reads the settings again, at SIGHUP or when their file has changed, and applies what they say of the workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from publishers.logs import log_event
from router.checking import check
from router.cli import Source
from router.settings import Settings, SettingsError, options
from router.workers.roster import Roster

logger = logging.getLogger(__name__)

_INTERVAL = 1.0
"""Seconds between two looks at the file."""


class Reloading:
    """`settings`: those in force, which stay so but for the workers."""

    def __init__(
        self, source: Source, settings: Settings, roster: Roster, read_files: Callable[[], Callable[[], None]]
    ) -> None:
        """`read_files`: reads what the settings name anew, in a thread, and returns what takes it over. Raises
        SettingsError."""
        self._source = source
        self._settings = settings
        self._roster = roster
        self._read_files = read_files
        self._turn = asyncio.Lock()
        self._waiting = False
        """Somebody waits for the turn, and will read what is there by then."""

    async def reload(self, *, say_none: bool = True) -> None:
        """Settings that cannot be used change nothing; what has changed beside the workers takes a restart.
        `say_none`: log it even where no worker has changed."""
        if self._waiting:
            return
        self._waiting = True
        try:
            await self._turn.acquire()  # what is read later is taken over later
        finally:
            self._waiting = False
        try:
            await self._reload(say_none)
        finally:
            self._turn.release()

    async def _reload(self, say_none: bool) -> None:
        """Reads in a thread: a file of thousands of API keys takes long, and streams go on meanwhile."""
        try:
            settings, others = await asyncio.to_thread(read_again, self._source, self._settings)
            take_files = await asyncio.to_thread(self._read_files)
        except SettingsError as error:
            log_event(logger, logging.ERROR, "The settings stay as they are", reason=error)
            return
        take_files()
        changed = self._roster.take(settings.workers, self._settings.drain_timeout)
        if changed or say_none:
            log_event(logger, logging.INFO, "Settings read again", workers_changed=",".join(changed) or "none")
        if others:
            message = "Other settings have changed too: they take a restart"
            log_event(logger, logging.WARNING, message, settings=",".join(others))

    async def watch(self, file: Path, interval: float = _INTERVAL) -> None:
        """Until cancelled, reload whenever the file's content has changed."""
        await follow(file, lambda first: self.reload(say_none=not first), interval)


def read_again(source: Source, in_force: Settings) -> tuple[Settings, list[str]]:
    """The settings as they are stated now, and the keys of those, besides the workers, that are not as they are in
    force. Raises SettingsError."""
    settings = source.read_again()
    said, before = vars(settings), vars(in_force)
    differing = (option for option in options() if said[option.attribute] != before[option.attribute])
    others = [option.key for option in differing if option.attribute != "workers"]
    if others:  # else only the restart would find out what is wrong with them
        check(settings)
    return settings, others


async def follow(file: Path, reload: Callable[[bool], Awaitable[object]], interval: float = _INTERVAL) -> None:
    """Until cancelled, call `reload` whenever the file's content has changed, once it has not been written to between
    two looks: half of a list of workers can be read as well. Also at first, which is what it is told, as the file may
    have changed while the router started."""
    seen: tuple[int, ...] | None = None
    read: tuple[int, ...] | None = None
    content: bytes | None = None
    while True:
        last, seen = seen, await asyncio.to_thread(_mark, file)
        if seen == last != read:
            first, read, before = read is None, seen, content
            content = await asyncio.to_thread(_content, file)
            if content is not None and not content.strip():  # half written, most often; SIGHUP takes it at its word
                log_event(logger, logging.ERROR, "The settings stay as they are", reason=f"{file} is empty.")
            elif content != before:
                await _call_or_log(reload, first)
        await asyncio.sleep(interval)


async def _call_or_log(reload: Callable[[bool], Awaitable[object]], first: bool) -> None:
    try:
        await reload(first)
    except Exception:  # else the file would never be looked at again
        logger.exception("The settings could not be taken over")


def _mark(file: Path) -> tuple[int, ...]:
    """Changes whenever the file is written or replaced, as a ConfigMap's is; () if there is none."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
