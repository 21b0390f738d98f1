"""`kv-publisher` and `python -m publishers`: the publisher of one engine, as a process of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from publishers.cli import Options, parse
from publishers.connect import make_plane
from publishers.embedded_nats import NatsServerError
from publishers.logs import configure_logging, log_event
from publishers.publisher import EnginePublisher

logger = logging.getLogger("publishers")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status: 0 after a signal, 1 when the event plane cannot be had."""
    options = parse(argv)
    configure_logging(options.log_level, options.log_format)
    try:
        import uvloop  # noqa: PLC0415 - there is none for Windows

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        return runner.run(_publish(options))


async def _publish(options: Options) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    plane = make_plane(options.nats)
    publisher = EnginePublisher(
        worker_id=options.worker_id,
        url=options.engine,
        plane=plane,
        namespace=options.namespace,
        events=options.events,
        replay=options.replay,
        block_size=options.block_size,
        load_interval=options.load_interval,
    )
    try:
        await plane.start()
        await publisher.start()
        await stop.wait()
    except NatsServerError as error:
        log_event(logger, logging.ERROR, str(error))
        return 1
    finally:
        await publisher.close()
        await plane.close()
    log_event(logger, logging.INFO, "Ended", worker=options.worker_id)
    return 0


if __name__ == "__main__":
    sys.exit(main())
