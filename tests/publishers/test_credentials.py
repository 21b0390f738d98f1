"""Keys and certificates from files: what cannot be used is told in one sentence, and nothing of it is quoted."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

import publishers.dialogue
from engines.probe import Answer
from publishers.credentials import client_context, make_session, read_key, warn_of_readable
from publishers.dialogue import fetch
from tests.certificates import Authority
from tests.fakes.http_engine import HttpEngine, running
from tests.fakes.waiting import until


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_nothing_named_is_nothing_made() -> None:
    assert client_context("--worker", None, None, None) is None


def test_what_is_named_is_trusted_alone_and_shown(ca: Authority) -> None:
    pair = ca.pair("h")
    context = client_context("--worker", ca.file, *pair)
    assert context
    assert len(context.get_ca_certs()) == 1
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_authorities_may_have_remarks_in_any_language(ca: Authority, tmp_path: Path) -> None:
    """As the bundles of some systems have, which name each authority."""
    bundle = tmp_path / "bundle"
    bundle.write_text(f"# Főtanúsítvány\n{Path(ca.file).read_text()}", "utf-8")
    context = client_context("--worker", str(bundle), None, None)
    assert context
    assert len(context.get_ca_certs()) == 1


def test_files_that_cannot_be_used_are_told_with_their_flag(ca: Authority, tmp_path: Path) -> None:
    one, other = ca.pair("h", "one"), ca.pair("h", "other")
    text = tmp_path / "text"
    text.write_text("SECRET")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    encrypted = tmp_path / "encrypted"
    key = load_pem_private_key(Path(one.key).read_bytes(), None)
    encrypted.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")))
    nowhere = str(tmp_path / "nowhere")
    cases = [
        ((nowhere, None, None), "--x-ca: .*nowhere cannot be read: No such file"),
        ((str(tmp_path), None, None), "--x-ca: .* cannot be read: Is a directory"),
        ((str(text), None, None), "--x-ca: .*text holds no certificate in PEM form"),
        ((one.key, None, None), "--x-ca: .* holds no certificate"),
        ((str(binary), None, None), "--x-ca: .*binary is not a text file"),
        ((None, one.cert, None), "--x-cert needs --x-key beside it"),
        ((None, None, one.key), "--x-key needs --x-cert beside it"),
        ((None, nowhere, one.key), "--x-cert: .*nowhere cannot be read"),
        ((None, one.cert, nowhere), "--x-key: .*nowhere cannot be read"),
        ((None, one.cert, other.key), "--x-key: .*other.key is not the key of the certificate in .*one.crt"),
        ((None, str(text), one.key), "--x-cert and --x-key: .* hold no certificate and its key"),
        ((None, one.cert, str(text)), "--x-cert and --x-key: .* hold no certificate and its key"),
        ((None, one.cert, str(encrypted)), "--x-key: .*encrypted is encrypted"),
    ]
    for files, says in cases:
        with pytest.raises(ValueError, match=says) as caught:
            client_context("--x", *files)
        assert "SECRET" not in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n", "SECRET two", "SECRET\nsecond", "SECRET\x00", "SÉCRET"])
def test_a_key_is_one_word(tmp_path: Path, content: str) -> None:
    """Whatever else is in it would be a header of its own."""
    file = tmp_path / "key"
    file.write_text(content)
    with pytest.raises(ValueError, match="must hold one key") as caught:
        read_key("--x", str(file))
    assert "CRET" not in str(caught.value).replace(str(file), "")
    file.write_text("  SECRET\r\n")
    assert read_key("--x", str(file)) == "SECRET"


def test_a_secret_that_everybody_may_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    closed, opened = tmp_path / "closed", tmp_path / "opened"
    for file, mode in ((closed, 0o640), (opened, 0o604)):
        file.write_text("x")
        file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        warn_of_readable([str(closed), str(opened), None, str(tmp_path / "nowhere")])
    assert [record.fields["file"] for record in caplog.records] == [str(opened)]  # type: ignore[attr-defined]


async def get(session: aiohttp.ClientSession, url: str) -> None:
    async with session.get(url) as answer:
        await answer.read()


async def test_a_key_is_shown_to_the_engines_named_and_to_nobody_else() -> None:
    async with (
        running(HttpEngine()) as engine,
        running(HttpEngine()) as stranger,
        make_session(lambda: [f"{engine.url}/base"], "SECRET") as session,
    ):
        for one in (engine, stranger):
            await get(session, f"{one.url}/health")
    assert (engine.authorizations, stranger.authorizations) == (["Bearer SECRET"], [None])


async def test_who_is_shown_the_key_is_worked_out_once_until_engines_come_or_go() -> None:
    """With a thousand engines it takes milliseconds, and each is asked every second."""
    read = 0

    class Urls(tuple[str, ...]):
        def __iter__(self) -> Iterator[str]:
            nonlocal read
            read += 1
            return super().__iter__()

    async with running(HttpEngine()) as one, running(HttpEngine()) as other:
        urls = Urls([one.url])
        async with make_session(lambda: urls, "SECRET") as session:
            for engine in (one, other, one, other):
                await get(session, engine.url)
            assert read == 1
            urls = Urls([other.url])
            for engine in (one, other):
                await get(session, engine.url)
    assert (one.authorizations, other.authorizations) == (
        ["Bearer SECRET", "Bearer SECRET", None],
        [None, None, "Bearer SECRET"],
    )
    assert read == 2


async def test_no_redirect_is_followed() -> None:
    async with running(HttpEngine()) as stranger, running(HttpEngine()) as engine:
        for status in (301, 302, 303, 307, 308):
            engine.answers["/x"] = (status, f"{stranger.url}/health".encode())
            async with make_session(lambda: [engine.url], "SECRET") as session:
                with pytest.raises(aiohttp.ClientError, match="redirect"):
                    await get(session, f"{engine.url}/x")
                with pytest.raises(aiohttp.ClientError, match="redirect"):
                    await session.post(f"{engine.url}/x", data=b"a prompt")
    assert stranger.asked == []


async def test_those_who_do_not_answer_keep_nobody_else_from_being_asked() -> None:
    """Else, where a hundred are gone, all others are asked late how they are and what their load is, or too late."""
    asked = 0

    async def never(_: bytes) -> tuple[int, bytes]:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        return 200, b""

    async with (
        running(HttpEngine({"/health": never})) as gone,
        running(HttpEngine()) as well,
        make_session(list) as session,
    ):
        waiting = [asyncio.create_task(fetch(session, gone.url, "/health", 60.0)) for _ in range(150)]
        await until(lambda: asked >= 100)
        assert (await fetch(session, well.url, "/health", 2.0))[0].status == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_answer_without_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers.dialogue, "MOST_BYTES", 1000)
    engine_of = HttpEngine({"/a": (200, b"x" * 1000), "/b": (200, b"x" * 1001)})
    async with running(engine_of) as engine, make_session(list) as session:
        async with session.get(f"{engine.url}/a") as answer:
            assert await publishers.dialogue.read_whole(answer) == b"x" * 1000
        async with session.get(f"{engine.url}/b") as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await publishers.dialogue.read_whole(answer)
        assert (await fetch(session, engine.url, "/b", 5.0))[0] == Answer(0)
