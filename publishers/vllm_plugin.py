"""A vLLM plug-in that publishes on NATS from inside the engine, without ZMQ and without polling.

Installed with this package (entry-point group `vllm.general_plugins`), asleep until KV_ROUTER_NATS is set. Then

    KV_ROUTER_NATS=nats://nats:4222 KV_ROUTER_WORKER_ID=10.0.0.1:8000 vllm serve MODEL \\
        --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq"}'

publishes as worker 10.0.0.1:8000 (the name that the router has for this engine). `zmq` has to be said, as vLLM knows no
other name, but no ZMQ socket is opened. KV_ROUTER_NAMESPACE is `default` unless set, and KV_ROUTER_FIRST_RANK 0.

vLLM is imported only when vLLM itself calls `register`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from publishers.plugin_settings import Settings, settings_from

logger = logging.getLogger(__name__)

UNKNOWN_VERSION = "This version of vLLM has no place for KV_ROUTER_NATS: its KV events go where vLLM's own settings say"


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once; puts our publisher in the place of ZMQ's."""
    settings = settings_from(os.environ)
    if settings is None:
        return
    try:
        _take_the_place_of_zmq(settings)
    except Exception:
        # Of another version, with other names: vLLM ends when a plug-in raises.
        logger.exception(UNKNOWN_VERSION)


def _take_the_place_of_zmq(settings: Settings) -> None:
    from vllm.distributed.kv_events import EventPublisherFactory  # noqa: PLC0415 - only ever inside vLLM

    # register_publisher() refuses a name that is taken, and vLLM's configuration accepts no name of ours.
    EventPublisherFactory._registry["zmq"] = make_publisher_class(settings)  # noqa: SLF001


def make_publisher_class(settings: Settings) -> type[Any]:
    """A vLLM `EventPublisher` class that publishes as `settings` say."""
    from vllm.distributed.kv_events import EventPublisher  # noqa: PLC0415 - only ever inside vLLM

    class NatsEventPublisher(EventPublisher):  # type: ignore[misc] # Any: vLLM is not installed where types are checked
        """Takes the arguments of vLLM's ZMQ publisher and needs none but the rank."""

        def __init__(self, data_parallel_rank: int = 0, **_: Any) -> None:
            super().__init__(data_parallel_rank)
            # Not before a publisher is made: see publishers.plugin_settings.
            from engines.vllm.decode import Decoder  # noqa: PLC0415
            from publishers.in_process import EventThread  # noqa: PLC0415

            self._thread = EventThread(settings, settings.rank(data_parallel_rank), Decoder)

        def publish(self, events: Any) -> None:
            self._thread.publish(events)

        def shutdown(self) -> None:
            self._thread.stop()

    return NatsEventPublisher
