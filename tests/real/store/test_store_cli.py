"""`router store` tells of a real store what is really there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real.pd.requests import directly, telling
from tests.real.prompts import ids

from .members import Master, Member, until_stored

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

TOKENS = 428


def told(*arguments: str) -> Any:
    command = [sys.executable, "-m", "router", "store", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


def test_status_and_query(master: Master, a: Member, tmp_path: Path) -> None:
    prompt = ids("store cli", TOKENS)
    directly(a, telling("ids", "store cli") | {"prompt": prompt})
    blocks = TOKENS // a.block
    until_stored(master, a.keys(prompt))

    status = told("status", "--store", master.url, "--worker", a.url)
    assert status["health"]["role"] == "leader"
    assert len(status["segments"]) == 2
    [kept] = status["kept"]
    assert (kept["engine"], kept["tp"], kept["digest_bits"]) == ("vllm", 1, 256)
    assert kept["keys"] == status["counted"]["keys"] >= blocks
    assert [named["agrees"] for named in status["named"]] == [True]
    other = told("status", "--store", f"{master.url},model=another")
    assert [named["agrees"] for named in other["named"]] == [False]

    request = tmp_path / "request.json"
    request.write_text(json.dumps({"prompt": [*prompt, *ids("and on", a.block)]}))
    found = told("query", "--store", master.url, "--worker", a.url, "--request", str(request))
    assert (found["stored_blocks"], found["blocks"]) == (blocks, (TOKENS + a.block) // a.block)
    assert found["missing_key"] is not None
    assert sum(owner["objects"] for owner in found["owners"]) == blocks
    assert {owner["segment"] for owner in found["owners"]} <= {place["name"] for place in status["segments"]}
    unknown = told("query", "--store", master.url, "--worker", a.url, "a text that nobody has asked for yet " * 20)
    assert (unknown["stored_blocks"], unknown["tokens"] > a.block) == (0, True)
