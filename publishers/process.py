"""The publisher of one engine, as a process of its own."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import ssl
import sys
from collections.abc import Sequence
from typing import NamedTuple

from publishers.cli import Options, parse
from publishers.compiling import explained
from publishers.connect import make_plane
from publishers.credentials import client_context, make_session, read_key, warn_of_readable
from publishers.embedded_nats import NatsServerError
from publishers.event_loop import EventLoop
from publishers.logs import configure_logging, log_event
from publishers.pipes import refuse_pipes
from publishers.plane import EventPlane
from publishers.publisher import EnginePublisher
from publishers.rank import warm_up

logger = logging.getLogger("publishers")


def run(argv: Sequence[str] | None) -> int:
    """Returns the process's exit status: 0 after a signal, 1 when the event plane cannot be had, 2 for a file that
    cannot be used."""
    options = parse(argv)
    try:
        access = _access(options)
    except ValueError as error:
        sys.stderr.write(f"kv-publisher: {error}\n")
        return 2
    configure_logging(options.log_level, options.log_format)
    warn_of_readable(
        (options.worker_api_key_file, options.worker_key, options.nats_creds, options.nats_nkey_seed, options.nats_key)
    )
    with explained():
        warm_up()  # before the loop: a signal ends it meanwhile
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(_publish(options, access))


class _Access(NamedTuple):
    """What is shown to the engine, and the event plane, not yet started."""

    key: str | None
    tls: ssl.SSLContext | None
    plane: EventPlane


def _access(options: Options) -> _Access:
    """Raises ValueError."""
    file, ca, cert, private = options.worker_api_key_file, options.worker_ca, options.worker_cert, options.worker_key
    given = ("--worker-api-key-file", file), ("--worker-ca", ca), ("--worker-cert", cert), ("--worker-key", private)
    refuse_pipes(given)
    key = read_key("--worker-api-key-file", file) if file else None
    tls = client_context("--worker", ca, cert, private)
    return _Access(key, tls, make_plane(options.nats, options.nats_files))


async def _publish(options: Options, access: _Access) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    plane, session = access.plane, make_session(lambda: [options.engine], access.key, access.tls)
    publisher = EnginePublisher(
        worker_id=options.worker_id,
        url=options.engine,
        plane=plane,
        namespace=options.namespace,
        events=options.events,
        replay=options.replay,
        block_size=options.block_size,
        load_interval=options.load_interval,
        event_hosts=options.event_host,
        session=session,
    )
    try:
        await plane.start()
        await publisher.start()
        gc.freeze()  # what is there by now stays: looking for garbage in it takes long, when it ends too
        await stop.wait()
    except NatsServerError as error:
        log_event(logger, logging.ERROR, str(error))
        return 1
    finally:
        await publisher.close()
        await plane.close()
        await session.close()
    log_event(logger, logging.INFO, "Ended", worker=options.worker_id)
    return 0
