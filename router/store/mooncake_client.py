"""Mooncake's own client, in a process of its own: `python -m router.store.mooncake_client RPC_HOST:PORT`.

Some of what a master does it does for its clients only, not over HTTP. The client is a library in C++ with threads and
logs of its own, and its calls block: apart, none of that gets near a request. The process offers no memory to the
store. It reads a line for each task, and answers each with one: null, or what is wrong.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import sys
from typing import Final, TextIO, cast

import msgspec

from publishers.streams import take_output

PATIENCE: Final = 10.0
"""Seconds for the client's start, and for a task to be taken."""
_BUFFER = 1 << 20
"""Bytes for objects in transfer. The client wants some, though none passes through it."""


class ClientFailed(Exception):
    """What went wrong, in words for people."""


def is_installed() -> bool:
    return importlib.util.find_spec("mooncake") is not None


class MooncakeClient:
    """Starts with the first task, and again with the next one after it has failed."""

    def __init__(self, rpc: str, python: str = sys.executable) -> None:
        """`rpc`: HOST:PORT of the master's RPC."""
        self._command = (python, "-m", __name__, rpc)
        self._process: asyncio.subprocess.Process | None = None

    async def copy(self, key: str, segment: str) -> None:
        """Have the store copy an object to a segment, called by its name; the master sees to it later. One call at a
        time. Raises ClientFailed, also when the master does not want to."""
        try:
            async with asyncio.timeout(PATIENCE):
                process = self._process or await self._start()
                await self._ask(process, msgspec.json.encode((key, segment)) + b"\n")
        except TimeoutError:
            await self.close()
            raise ClientFailed(f"Mooncake's client did not answer within {PATIENCE:g} s") from None

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True
            )
        except OSError as error:
            raise ClientFailed(f"Mooncake's client cannot be started: {error.strerror or error}") from None
        try:
            await self._ask(process, b"")
        except ClientFailed:  # it says why, and ends
            await self.close()
            raise
        return process

    async def _ask(self, process: asyncio.subprocess.Process, line: bytes) -> None:
        """Send a line, if there is one, and take the next answer."""
        to, answers = cast("asyncio.StreamWriter", process.stdin), cast("asyncio.StreamReader", process.stdout)
        try:
            to.write(line)
            await to.drain()
            answer = await answers.readline()
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):
            await self.close()
            raise ClientFailed("Mooncake's client has ended")
        if (wrong := msgspec.json.decode(answer, type=str | None)) is not None:
            raise ClientFailed(wrong)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()


# -- the process


def main(rpc: str) -> None:
    answers = os.fdopen(take_output(), "w")
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 -- an extra
    except ImportError as error:
        _answer(answers, f"Mooncake's client cannot be imported: {error}")
        return
    try:
        own_address = _own_address(rpc)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that none can be
        reason = getattr(error, "strerror", None) or error
        _answer(answers, f"there is no way to the master at {rpc}, the store's rpc: {reason}")
        return
    store = MooncakeDistributedStore()
    if code := store.setup(own_address, "P2PHANDSHAKE", 0, _BUFFER, "tcp", "", rpc):
        _answer(answers, f"Mooncake's client does not reach the master at {rpc}: its error {code}")
        return
    _answer(answers, None)
    for line in sys.stdin.buffer:
        key, segment = msgspec.json.decode(line, type=tuple[str, str])
        _, code = store.create_copy_task(key, [segment])
        _answer(answers, f"the master does not copy: its error {code}" if code else None)
    store.close()


def _answer(answers: TextIO, wrong: str | None) -> None:
    answers.write(msgspec.json.encode(wrong).decode() + "\n")
    answers.flush()


def _own_address(rpc: str) -> str:
    """This machine's address on the way to the master's host. Nothing is sent to find it."""
    host, _, port = rpc.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
        return found


if __name__ == "__main__":
    main(sys.argv[1])
