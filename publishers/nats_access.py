"""Credentials for NATS, and a client that insists on the encryption that was asked for."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nats.errors
from nats.aio.client import Client

from publishers.credentials import NatsFiles, client_context, read_file
from publishers.pipes import refuse_pipes

_CONNECT = b"CONNECT "
_CREDS = re.compile(r"-BEGIN NATS USER JWT-.*-BEGIN USER NKEY SEED-", re.DOTALL)


def check_files(urls: Sequence[str], files: NatsFiles) -> None:
    """Raises ValueError for files that cannot be used."""
    refuse_pipes((f"--nats-{name.replace('_', '-')}", path) for name, path in files._asdict().items())
    tls = _context(files)
    if tls and not all(url.startswith("tls://") for url in urls):
        raise ValueError("--nats-ca, --nats-cert and --nats-key are for tls://, as nats:// may stay in the clear.")
    if files.creds and files.nkey_seed:
        raise ValueError("--nats-creds and --nats-nkey-seed are two ways to say the same: give one.")
    if files.creds or files.nkey_seed:
        _require_nkeys()
    if files.creds and not _CREDS.search(read_file("--nats-creds", files.creds)):
        raise ValueError(f"--nats-creds: {files.creds} holds no NATS credentials (a user's JWT and nkey seed).")
    if files.nkey_seed:
        _check_seed(files.nkey_seed)


def _context(files: NatsFiles) -> ssl.SSLContext | None:
    return client_context("--nats", files.ca, files.cert, files.key)


def _require_nkeys() -> None:
    """Raises ValueError. An engine's environment, in which our plug-in runs, may be without that package."""
    if importlib.util.find_spec("nkeys") is None:
        raise ValueError("--nats-creds and --nats-nkey-seed need the package nkeys, which is not installed.")


def _check_seed(path: str) -> None:
    import nkeys  # noqa: PLC0415 -- may be missing where it is not needed

    seed = read_file("--nats-nkey-seed", path).strip()
    try:
        nkeys.from_seed(bytearray(seed, "ascii")).wipe()
    except Exception:  # noqa: BLE001 -- what it raises depends on where it stumbles
        raise ValueError(f"--nats-nkey-seed: {path} holds no nkey seed (SU…).") from None


class SafeClient(Client):
    """nats-py's client without some of its shortcomings: `publish` is a coroutine only; with tls:// it goes on
    unencrypted if the server does not insist on TLS, as an attacker in between may pretend; when a reconnect ends in an
    unexpected error it tries no more, and leaves the connection open; it does not decode the user and password of a
    URL, nor use them for other servers of a cluster; it has no place for certificates that change, and cannot be closed
    where it found no nkey seed; it puts errors into lower case, and so the subjects that they name; it does not tell
    its streams that they are encrypted; it makes no new connection while there is something left to write to the one
    that is lost."""

    def __init__(self, files: NatsFiles = NatsFiles()) -> None:  # noqa: B008 -- immutable
        super().__init__()
        self._files = files

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """For the connection to be made. Raises nats.errors.Error for files that cannot be used, as in the middle of a
        change."""
        try:
            return _context(self._files) or ssl.create_default_context()
        except ValueError as error:
            raise nats.errors.Error(str(error)) from None

    def publish_now(self, subject: str, payload: bytes, reply: str) -> None:
        """Publish without waiting: below the limit of pending bytes, nats-py only appends to a list. Raises
        nats.errors.Error."""
        publishing = self.publish(subject, payload, reply)
        try:
            publishing.send(None)
        except StopIteration:
            return
        publishing.close()
        raise nats.errors.Error("what writes to the server has ended")

    def _setup_nkeys_connect(self) -> None:
        """Reads the seed: not before the server has spoken, see `_connect_command`."""

    @property
    def _tls_was_asked_for(self) -> bool:
        return self._current_server is not None and self._current_server.uri.scheme == "tls"

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """What a server says of itself. One that leaves TLS to its clients (allow_non_tls) only says that it has it."""
        if initial_connection and self._tls_was_asked_for and info.get("tls_available"):
            info["tls_required"] = True  # which alone nats-py looks for
        await super()._process_info(info, initial_connection)

    async def _process_connect_init(self) -> None:
        """The handshake. Credentials are read again each time, from files that may be in the middle of a change."""
        try:
            await super()._process_connect_init()
        except (OSError, TimeoutError, nats.errors.Error):
            self.hang_up()
            raise
        except Exception as error:
            self.hang_up()
            raise nats.errors.Error(f"the server could not be greeted: {error!r}") from error
        self._introduce_tls()

    def _introduce_tls(self) -> None:
        """The stream that decrypts was made by hand, and takes itself for a plain one: asyncio would then warn when the
        server ends the connection, as it does whenever it is restarted."""
        writer = getattr(self._transport, "_io_writer", None)
        if isinstance(writer, asyncio.StreamWriter) and writer.get_extra_info("sslcontext"):
            vars(writer.transport.get_protocol())["_over_ssl"] = True  # its own method may be called once only

    async def _process_err(self, err_msg: str) -> None:
        """The message comes in lower case. Of the subjects that it may name, only inboxes' are put right: an operator
        has to permit `_INBOX.>`, and the others can be recognised as they are."""
        await super()._process_err(err_msg.replace('"_inbox.', '"_INBOX.'))

    async def _attempt_reconnect(self) -> None:
        self.hang_up()
        await super()._attempt_reconnect()

    def hang_up(self) -> None:
        """At once: a connection that is closed in good order waits until the server has taken what is left, which one
        that hangs never does, and one that is gone for a quarter of an hour."""
        writer = getattr(self._transport, "_bare_io_writer", None)
        if isinstance(writer, asyncio.StreamWriter):
            writer.transport.abort()

    def _connect_command(self) -> bytes:
        """The first message to the server; it may hold a password."""
        if self._tls_was_asked_for and not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server offers no TLS, and tls:// was asked for")
        creds = self._user_credentials
        if isinstance(creds, str) and not _CREDS.search(Path(creds).read_text()):  # where nats-py would look for ever
            raise nats.errors.Error(f"{creds} holds no NATS credentials")
        if creds or self._nkeys_seed:
            super()._setup_nkeys_connect()
        command = bytes(super()._connect_command())
        return command if creds or self._nkeys_seed else _with_user(command, self._user_of_url())

    def _user_of_url(self) -> dict[str, str]:
        """The user and password in the server's URL; for a server that others of its cluster named, those in theirs."""
        server = self._current_server
        uris = [server.uri] if server else []
        if server and server.discovered:
            uris += [each.uri for each in self._server_pool]
        user, password = next(((uri.username, uri.password) for uri in uris if uri.username is not None), (None, None))
        if user is None:
            return {}
        return {"auth_token": unquote(user)} if password is None else {"user": unquote(user), "pass": unquote(password)}


def _with_user(command: bytes, user: dict[str, str]) -> bytes:
    said = json.loads(command.removeprefix(_CONNECT)) | user
    return _CONNECT + json.dumps(said).encode() + b"\r\n"
