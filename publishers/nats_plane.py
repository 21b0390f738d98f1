"""The event plane over NATS core. The replies to a request go to its inbox; an empty message ends them.

nats-py resumes a lost connection by itself. Where it gives up (a first connection that never worked, credentials
refused later) this module makes a new client, so that a started plane is connected whenever its broker can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from urllib.parse import urlsplit

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from publishers.credentials import NatsFiles
from publishers.ending import end_tasks
from publishers.logs import log_event
from publishers.nats_access import SafeClient
from publishers.plane import OnMessage, OnRequest, PlaneUnavailable, Unsubscribe

logger = logging.getLogger(__name__)

PENDING_LIMIT = 32 * 1024 * 1024
"""The most bytes that wait to be written; messages beyond that are dropped. Replies fill only half of it and then wait,
since they can be large: a snapshot of a million blocks takes 8 MB. nats-server disconnects a client at 64 MB."""

REPLY_TIMEOUT = 5.0
"""Seconds to wait for each reply."""

CONNECT_TIMEOUT = 2
"""Seconds for a connection, and again for the server's greeting."""
RECONNECT_WAIT = 0.25
PING_INTERVAL = 10
"""Two pings without an answer are a lost connection: 30 s at worst when no packet comes back at all."""

CLOSE_TIMEOUT = 2.0
ROUND_TRIP_TIMEOUT = 2.0

_NO_RESPONDERS = "503"
_BROKEN = (OSError, nats.errors.StaleConnectionError)
"""Errors of a broken connection, logged only for debugging: nats-py reports the disconnection separately."""
_NO_GREETING = "expecting INFO"
_PERMISSIONS = "permissions violation"
_AWAY = "NATS cannot be reached yet"
_REFUSED = "NATS does not take all that we subscribe to, and is tried again"
_TOO_LARGE = "Messages are lost, as the NATS server takes only smaller ones: let its max_payload be 64 kB or more"
_MOST_TOLD = 20
"""Errors logged for one connection at most: a missing permission makes one for each subject."""
_OnMsg = Callable[[Msg], Awaitable[None]]


class NatsPlane:
    """An `EventPlane` over the NATS servers at `urls` (nats:// or tls://, credentials in the URL)."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        files: NatsFiles = NatsFiles(),  # noqa: B008 -- immutable
        pending_limit: int = PENDING_LIMIT,
        reply_timeout: float = REPLY_TIMEOUT,
    ) -> None:
        self.dropped = 0
        """Messages not handed over: no connection, a full buffer, or larger than the server takes."""
        self._use(urls)
        self._files = files
        self._pending_limit = pending_limit
        self._reply_timeout = reply_timeout
        self._client: SafeClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._attempted = asyncio.Event()
        self._away = False
        self._slow = False
        self._told: set[str] = set()
        """Errors logged since the last connection was made."""
        self._waiting: set[asyncio.Queue[Msg | None]] = set()
        """For replies; None ends them."""
        self._subscriptions: list[_Subscription] = []
        self._on_reconnect: list[Callable[[], None]] = []

    def _use(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._name = ", ".join(_without_credentials(url) for url in urls)

    def __repr__(self) -> str:
        return f"NatsPlane({self._name}, {'connected' if self.connected else 'away'})"

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    async def start(self) -> None:
        """Returns when the first attempt has worked or failed; keeps trying for ever until `close`."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"nats {self._name}")
        await self._attempted.wait()

    def publish(self, subject: str, payload: bytes) -> None:
        self._send(subject, payload)

    async def subscribe(self, subject: str, on_message: OnMessage) -> Unsubscribe:
        async def deliver(msg: Msg) -> None:
            on_message(msg.data)

        return await self._subscribe(subject, deliver)

    async def request(self, subject: str, payload: bytes) -> AsyncIterator[bytes]:
        client = self._client
        if client is None or not client.is_connected:
            raise PlaneUnavailable(f"no connection to {self._name}")
        inbox = client.new_inbox()
        replies: asyncio.Queue[Msg | None] = asyncio.Queue()

        async def collect(msg: Msg) -> None:
            replies.put_nowait(msg)

        subscription = await client.subscribe(inbox, cb=collect)
        self._waiting.add(replies)
        try:
            self._send(subject, payload, reply=inbox)
            while data := await self._next_reply(subject, replies):
                yield data
        finally:
            self._waiting.discard(replies)
            await _unsubscribe(subscription)

    async def serve(self, subject: str, on_request: OnRequest) -> Unsubscribe:
        async def answer(msg: Msg) -> None:
            if not msg.reply:
                return
            # All replies are made before the first is sent, so that they show one state. Events published meanwhile may
            # overtake them, which can happen anyway: receivers sort by event id, and ask again if some were lost.
            for reply in [*on_request(msg.data), b""]:
                await self._room_for_events()
                self._send(msg.reply, reply)

        return await self._subscribe(subject, answer)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._on_reconnect.append(callback)

    async def close(self) -> None:
        if self._task is None:
            return
        self._away = True  # the disconnection is intended: no warning
        await end_tasks([self._task])
        self._task = None
        self._subscriptions.clear()

    def _send(self, subject: str, payload: bytes, reply: str = "") -> None:
        client = self._client
        if client is None or not client.is_connected or client.pending_data_size + len(payload) > self._pending_limit:
            self.dropped += 1
            return
        try:
            client.publish_now(subject, payload, reply)
        except nats.errors.Error as error:
            self.dropped += 1
            too_large = isinstance(error, nats.errors.MaxPayloadError)
            self._tell_once(_TOO_LARGE if too_large else "Messages cannot be sent", error)

    async def _room_for_events(self) -> None:
        """Waits while more than half of the buffer is full, so that events still fit; not while disconnected."""
        client = self._client
        while client is not None and client.is_connected and client.pending_data_size > self._pending_limit // 2:
            await _round_trip(client)

    async def _next_reply(self, subject: str, replies: asyncio.Queue[Msg | None]) -> bytes:
        try:
            async with asyncio.timeout(self._reply_timeout):
                msg = await replies.get()
        except TimeoutError:
            raise PlaneUnavailable(f"no answer on {subject} within {self._reply_timeout:g} s") from None
        if msg is None:
            raise PlaneUnavailable(f"the connection to {self._name} was lost amid an answer on {subject}")
        if not msg.data and msg.headers and msg.headers.get("Status") == _NO_RESPONDERS:
            raise PlaneUnavailable(f"nobody serves {subject}")
        return msg.data

    async def _subscribe(self, subject: str, on_msg: _OnMsg) -> Unsubscribe:
        entry = _Subscription(subject, on_msg)
        self._subscriptions.append(entry)
        if self._client is not None:
            with contextlib.suppress(nats.errors.ConnectionClosedError):  # the next client will subscribe
                await entry.attach(self._client)

        async def unsubscribe() -> None:
            if entry in self._subscriptions:
                self._subscriptions.remove(entry)
                await entry.detach(self._client)

        return unsubscribe

    async def _run(self) -> None:
        while True:
            try:
                await self._connection()
            except Exception as error:
                # Any exception of the library: the plane must reconnect.
                if self._is_news(error):
                    logger.exception("The connection to NATS broke down")
                self._attempted.set()
            self._went_down()
            await asyncio.sleep(RECONNECT_WAIT)

    async def _connection(self) -> None:
        """One nats-py client from its first connection until it gives up."""
        client, closed = SafeClient(self._files), asyncio.Event()

        async def on_closed() -> None:
            closed.set()

        try:
            await self._connect(client, on_closed)
            self._client = client
            await self._attach_all(client)
            if client.is_closed:  # nats-py does so at most of a server's errors, and tells nobody
                self._attempted.set()
                self._away = True
                self._tell_once(_REFUSED, client.last_error)
                return
            if client.is_connected:  # else nats-py tells when it is again
                await self._came_up()
            await closed.wait()
        finally:
            self._client = None
            await _close(client)

    async def _attach_all(self, client: SafeClient) -> None:
        with contextlib.suppress(nats.errors.ConnectionClosedError):
            for entry in tuple(self._subscriptions):
                if entry in self._subscriptions:
                    await entry.attach(client)

    async def _connect(self, client: SafeClient, on_closed: Callable[[], Awaitable[None]]) -> None:
        async def on_disconnected() -> None:
            self._went_down()

        await client.connect(
            self._urls,
            user_credentials=self._files.creds,
            nkeys_seed=self._files.nkey_seed,
            error_cb=self._on_error,
            disconnected_cb=on_disconnected,
            reconnected_cb=self._came_up,
            closed_cb=on_closed,
            connect_timeout=CONNECT_TIMEOUT,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT,  # type: ignore[arg-type] # annotated int, only ever slept
            ping_interval=PING_INTERVAL,
            pending_size=2 * self._pending_limit,
        )

    async def _on_error(self, error: Exception) -> None:
        if not self._attempted.is_set():
            self._attempted.set()
            self._away = True
            self._tell_once(_AWAY, _reason(error))
        elif isinstance(error, nats.errors.SlowConsumerError):
            if not self._slow:
                self._slow = True
                log_event(logger, logging.WARNING, "Messages came too fast; some are lost", subject=error.subject)
        elif not self.connected and _is_refusal(error):
            self._tell_once(_AWAY, _reason(error))
        elif self.connected and _PERMISSIONS in str(error).lower():
            self._tell_once("NATS does not permit our user all that is needed", error)
        elif isinstance(error, _BROKEN):
            log_event(logger, logging.DEBUG, "The connection to NATS broke", server=self._name, error=error)
        elif self.connected:
            # nats-py also reports exceptions of subscribers here.
            logger.error("An error of NATS or of a subscriber", exc_info=error)

    def _tell_once(self, message: str, error: object) -> None:
        if self._is_news(error):
            log_event(logger, logging.WARNING, message, server=self._name, error=error)

    def _is_news(self, error: object) -> bool:
        """Whether to log it: once per connection, as attempts to connect, and messages, are many."""
        news = str(error) not in self._told and len(self._told) < _MOST_TOLD
        if news:
            self._told.add(str(error))
        return news

    def _went_down(self) -> None:
        for replies in self._waiting:  # what was on its way is lost
            replies.put_nowait(None)
        if not self._away:
            self._away = True
            log_event(logger, logging.WARNING, "The connection to NATS is lost", server=self._name)

    async def _came_up(self) -> None:
        was_away, self._away = self._away, False
        self._slow = False
        self._told.clear()
        self._attempted.set()
        log_event(logger, logging.INFO, "Connected to NATS", server=self._name)
        for callback in self._on_reconnect if was_away else ():
            callback()


class _Subscription:
    """A subject and its callback, and nats-py's subscription of the present client, if there is one."""

    def __init__(self, subject: str, on_msg: _OnMsg) -> None:
        self._subject = subject
        self._on_msg = on_msg
        self._carried: Subscription | None = None

    async def attach(self, client: SafeClient) -> None:
        self._carried = await client.subscribe(self._subject, cb=self._on_msg)
        await _round_trip(client)

    async def detach(self, client: SafeClient | None) -> None:
        if self._carried is not None:
            await _unsubscribe(self._carried)
        if client is not None:
            await _round_trip(client)


def _is_refusal(error: Exception) -> bool:
    """Whether a server answered and refused us, as after a change of credentials or of a certificate."""
    lost = isinstance(error, nats.errors.StaleConnectionError)
    return isinstance(error, ssl.SSLError | nats.errors.Error) and not lost


def _reason(error: Exception) -> object:
    """Of an attempt that failed. A time limit that has passed says nothing of itself, nor does nats-py say much of a
    server that hangs up at once."""
    if isinstance(error, TimeoutError):
        return "no NATS server answers there (it is another's port, it hangs, or a firewall is in between)"
    if _NO_GREETING in str(error):
        return "no NATS server greets there (it is another's port, or takes TLS only before it greets: handshake_first)"
    return getattr(error, "strerror", None) or error


async def _round_trip(client: SafeClient) -> None:
    """Waits until the server has processed everything sent before: it answers in order, here that nobody serves a
    subject made up for this.

    nats-py's flush does the same, but cancelling a flush kills the client's read loop.
    """
    if client.is_connected:
        with contextlib.suppress(nats.errors.Error):
            await client.request(client.new_inbox(), timeout=ROUND_TRIP_TIMEOUT)


async def _unsubscribe(subscription: Subscription) -> None:
    # Already gone with its connection: nothing left to do.
    with contextlib.suppress(nats.errors.Error):
        await subscription.unsubscribe()


async def _close(client: SafeClient) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await client.close()
    except (TimeoutError, OSError, nats.errors.Error) as error:
        log_event(logger, logging.DEBUG, "A NATS connection did not close cleanly", error=error)
    finally:
        client.hang_up()


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
