"""The process that serves: settings checked, the app started, and at a signal drained and closed, in that order."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import signal
import sys
from functools import partial

from publishers.embedded_nats import NatsServerError
from publishers.event_loop import EventLoop
from publishers.logs import configure_logging, log_event
from publishers.reasons import reason_of
from router.admin.surface import CannotAdminister
from router.app import App
from router.checking import check
from router.cli import Source, version
from router.early_signals import take_hangups
from router.open_files import warn_if_few
from router.port import check_free
from router.processes.member import AT_ONCE, Member, parent_ended
from router.settings import Settings, SettingsError
from router.unheeded import unheeded

logger = logging.getLogger("router")


def run(settings: Settings, source: Source | None = None, member: Member | None = None) -> int:
    """Serve until a signal; returns the process's exit status. `source`: where the settings came from, to be read anew.
    `member`: as one of several processes."""
    try:
        check(settings)
    except SettingsError as error:
        sys.stderr.write(f"kv-router: {error}\n")
        return 2
    every = {"process": member.number} if member else None
    configure_logging(settings.log_level, settings.log_format, every=every)
    if member is None or member.number == 0:
        _warn(settings)
    try:
        if member is None:  # of several, the first has looked
            check_free(settings.host, settings.port)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that none can be
        _cannot_listen(settings, error)
        return 1
    app = App(settings, member, source)  # before the loop: a signal ends it while it compiles
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        status = runner.run(_serve(app, settings, source, member))
    if status == 0:  # last, behind what signals say: the log of a router that was killed ends otherwise
        log_event(logger, logging.INFO, "Ended")
    return status


def _warn(settings: Settings) -> None:
    for flag, why in unheeded(settings).items():
        log_event(logger, logging.WARNING, f"A flag does nothing: {why}", flag=flag, router_mode=settings.router_mode)
    warn_if_few(len(settings.workers))


async def _serve(app: App, settings: Settings, source: Source | None, member: Member | None) -> int:
    stop = asyncio.Event()
    _handle_signals(app, stop, member)
    await asyncio.sleep(0)  # where a Ctrl-C from before the handlers ends it: nothing is open yet
    if not await _start(app, settings):
        await app.close()
        return 1
    _tell_what_serves(settings)
    if source:
        take_hangups(app.on_hangup)
    _leave_to_itself()
    orphaned = asyncio.create_task(_stop_with_parent(stop, member)) if member else None
    await stop.wait()
    await app.drain(settings.drain_timeout)
    await app.close()
    if orphaned:
        orphaned.cancel()
    return 0


def _handle_signals(app: App, stop: asyncio.Event, member: Member | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set if member else partial(app.on_signal, stop))
    if member:
        loop.add_signal_handler(AT_ONCE, app.end_at_once)


async def _start(app: App, settings: Settings) -> bool:
    """Whether it has started; if not, the log says why."""
    try:
        await app.start()
    except (NatsServerError, CannotAdminister) as error:
        log_event(logger, logging.ERROR, f"Cannot start: {error}")
    except (OSError, UnicodeError) as error:
        _cannot_listen(settings, error)
    else:
        return True
    return False


def _tell_what_serves(settings: Settings) -> None:
    """What whoever reads a log of someone else's asks first."""
    policy = settings.kv_policy if settings.kv_overlap_score_weight is None else "overlap"
    fields = {"policy": policy} if settings.router_mode == "kv" else {}
    log_event(logger, logging.INFO, "Serving", version=version(), mode=settings.router_mode, **fields)


def _cannot_listen(settings: Settings, error: Exception) -> None:
    reason = reason_of(error) if isinstance(error, OSError) else error  # asyncio's words repeat the address
    log_event(logger, logging.ERROR, f"Cannot listen: {reason}", host=settings.host, port=settings.port)


def _leave_to_itself() -> None:
    """What is there by now stays: looking through all of it for garbage, again and again, takes 75 ms each time."""
    gc.collect()
    gc.freeze()


async def _stop_with_parent(stop: asyncio.Event, member: Member) -> None:
    await parent_ended()
    log_event(logger, logging.ERROR, "The parent process has ended, and this one with it")
    shutil.rmtree(member.folder, ignore_errors=True)  # the parent's, which was killed
    stop.set()
