"""The process that serves: settings checked, the app started, and at a signal drained and closed, in that order."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys

import uvloop

from publishers.embedded_nats import NatsServerError
from publishers.logs import configure_logging, log_event
from router.admin.surface import CannotAdminister
from router.app import App
from router.arms import check_mode, make_arms, reads_prompts
from router.cli import Source
from router.hangups import take_hangups
from router.open_files import warn_if_few
from router.policies import make_policy
from router.port import check_free
from router.processes.member import Member, parent_ended
from router.security.security import check_security
from router.settings import Settings, SettingsError
from router.store.mooncake_client import is_installed
from router.tokens import find_tokenizer

logger = logging.getLogger("router")


def run(settings: Settings, source: Source | None = None, member: Member | None = None) -> int:
    """Serve until a signal; returns the process's exit status. `source`: where the settings came from, to be read anew.
    `member`: as one of several processes."""
    try:
        check_tokenizer(settings)
        check_store(settings)
        make_policy(settings)
        make_arms(settings)
        check_mode(settings)
        check_security(settings)
    except SettingsError as error:
        sys.stderr.write(f"kv-router: {error}\n")
        return 2
    every = {"process": member.number} if member else None
    configure_logging(settings.log_level, settings.log_format, every=every)
    warn_if_few(len(settings.workers))
    app = App(settings, member, source)
    try:
        if member is None:  # of several, the first has looked
            check_free(settings.host, settings.port)
    except (OSError, UnicodeError) as error:
        return _cannot_listen(settings, error)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # not the default: process 1 of a container would go on
    app.warm_up()  # half a minute at times, which a signal ends: no loop runs yet that would put it off
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(app, settings, member))


def _cannot_listen(settings: Settings, error: OSError | UnicodeError) -> int:
    """`error` UnicodeError: a name that none can be."""
    reason = getattr(error, "strerror", None) or error
    log_event(logger, logging.ERROR, f"Cannot listen: {reason}", host=settings.host, port=settings.port)
    return 1


def check_tokenizer(settings: Settings) -> None:
    """A stated tokenizer must be there; SettingsError says what is wrong. (Found ones are looked for later.)"""
    if reads_prompts(settings) and settings.tokenizer not in {"auto", "engine"}:
        find_tokenizer(settings.tokenizer, (), None)


def check_store(settings: Settings) -> None:
    """SettingsError when copies are wanted that cannot be asked for."""
    if settings.store and settings.store.copy and not is_installed():
        raise SettingsError(
            "the store's copy= needs Mooncake's client here: pip install mooncake-transfer-engine "
            "(without CUDA: mooncake-transfer-engine-non-cuda)"
        )


async def _serve(app: App, settings: Settings, member: Member | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, app.on_signal, stop)
    await asyncio.sleep(0)  # where a Ctrl-C from before the handlers ends it: nothing is open yet
    try:
        await app.start()
    except (NatsServerError, CannotAdminister) as error:
        log_event(logger, logging.ERROR, f"Cannot start: {error}")
        await app.close()
        return 1
    except OSError as error:
        await app.close()
        return _cannot_listen(settings, error)
    take_hangups(app.on_hangup)
    _leave_to_itself()
    orphaned = asyncio.create_task(_stop_with_parent(stop)) if member else None
    await stop.wait()
    if orphaned:
        orphaned.cancel()
    await app.drain(settings.drain_timeout)
    await app.close()
    return 0


def _leave_to_itself() -> None:
    """What is there by now stays: looking through all of it for garbage, again and again, takes 75 ms each time."""
    gc.collect()
    gc.freeze()


async def _stop_with_parent(stop: asyncio.Event) -> None:
    await parent_ended()
    stop.set()
