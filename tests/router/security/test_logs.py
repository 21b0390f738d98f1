"""No log line holds a prompt, a key or a token id, at the most talkative level and when everything goes wrong."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from publishers.logs import JsonFormatter, TextFormatter
from tests.fakes.raw_client import get, post
from tests.fakes.scripted_worker import ScriptedWorker, answer, drop, events, reset, says
from tests.router.proxy.running import RunningRouter, running
from tests.router.security.files import bearer, write_keys

PROMPT, KEY, ENGINES_KEY, WRONG = "MARKER-PROMPT", "kvr-MARKER-KEY", "sk-MARKER-ENGINES", "kvr-MARKER-WRONG"
ID = 918273645
SECRETS = (PROMPT, KEY, ENGINES_KEY, WRONG, str(ID), "MARKER-SALT", "MARKER-ANSWER")

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SALTED = {"prompt": PROMPT, "cache_salt": "MARKER-SALT"}
BODIES: list[tuple[str, bytes]] = [
    *[(COMPLETION, json.dumps(body).encode()) for body in (SALTED, {"prompt": [ID, ID]}, {"prompt": [[ID], [1]]})],
    (CHAT, json.dumps({"messages": [{"role": "user", "content": PROMPT}], "chat_template": PROMPT}).encode()),
    (CHAT, json.dumps({"messages": [{"role": "user", "content": [{"type": PROMPT}]}]}).encode()),
    (COMPLETION, json.dumps({"prompt": PROMPT, "stream": True}).encode()),
    (COMPLETION, json.dumps({"prompt": PROMPT, "model": "unknown"}).encode()),
    (COMPLETION, json.dumps({"prompt": [ID, "x"]}).encode()),
    (COMPLETION, json.dumps({"prompt": {PROMPT: ID}}).encode()),
    (COMPLETION, b'{"prompt":"MARKER-PROMPT"'),
    (COMPLETION, b'{"prompt":"MARKER-PROMPT\xff"}'),
    (COMPLETION, json.dumps({"prompt": PROMPT, "bootstrap_host": PROMPT}).encode()),
    ("/v1/embeddings", json.dumps({"input": PROMPT}).encode()),
    ("/v1/embeddings", b"MARKER-PROMPT"),
]
FAULTS = [
    drop,
    reset,
    answer(b'{"error":"MARKER-ANSWER"}', 500),
    answer(b'{"error":"MARKER-ANSWER"}', 400),
    says(b"MARKER-ANSWER\r\n\r\n"),
    says(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nMARKER-ANSWER", then=lambda dialogue: dialogue.drop()),
    says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nMARKER-ANSWER\r\n"),
    events(b'{"choices":[{"text":"MARKER-ANSWER"}]}'),
]


async def asked(router: RunningRouter, request: bytes) -> None:
    """Whatever comes of it."""
    async with router.client() as client:
        client.send(request)
        with suppress(ConnectionError):
            await client.rest()


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
async def test_logs_hold_no_prompt_no_key_and_no_token_id(
    a: ScriptedWorker, b: ScriptedWorker, tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engines_key = tmp_path / "engines"
    engines_key.write_text(ENGINES_KEY)
    settings: dict[str, Any] = {
        "api_keys": write_keys(tmp_path, {"name": "one", "key": KEY}),
        "worker_api_key_file": str(engines_key),
        "router_mode": mode,
        "health_interval": 0.2,
    }
    async with running(a, b, **settings) as router:
        for number, (path, body) in enumerate(BODIES * len(FAULTS)):
            fault = FAULTS[number // len(BODIES)]
            a.then(fault)
            b.then(fault)
            await asked(router, post(path, body, bearer(KEY), b"connection: close"))
            a.behave()
            b.behave()
        for path, body in BODIES:
            await asked(router, post(path, body, bearer(WRONG)))
        await asked(router, get("/metrics", bearer(KEY), b"connection: close"))
        await asked(router, b"MARKER-PROMPT nonsense\r\nAuthorization: MARKER-KEY\r\n\r\n")
    lines = [form.format(record) for record in caplog.records for form in (TextFormatter(), JsonFormatter())]
    assert any("Worker failed a request" in line for line in lines), "nothing went wrong"
    assert any("Decided" in line for line in lines), "not talkative"
    for secret in SECRETS:
        assert [line for line in lines if secret in line] == []
