"""How much of a prompt is in the store, told to a person who has it as text, as token ids or as a request."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from engines.description import Model
from engines.store import Segment, Stored
from indexer.hashing import pack_tokens
from indexer.types import Namespace, Tier
from router.store_cli.errors import WrongUse
from router.store_cli.query import namespace_of, read_found
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.store_master import Master

from .conftest import LAYOUT, Run

TEXT = "a prompt that is long"  # 21 letters, which the worker makes a token each: five full blocks of 4
TOKENS = pack_tokens([ord(letter) for letter in TEXT])


@pytest.fixture
def asked(master: Master, worker: ScriptedWorker) -> tuple[str, ...]:
    return "query", "--json", "--store", f"{master.url},tp=2", "--worker", worker.url


async def test_a_worker_that_wants_a_key_gets_it_and_the_master_does_not(
    run: Run, master: Master, worker: ScriptedWorker, asked: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("sk-worker\n", "utf-8")
    assert (await run(*asked, "--worker-api-key-file", str(file), TEXT)).status == 0
    assert worker.probes
    assert all(each.values(b"authorization") == [b"Bearer sk-worker"] for each in worker.probes)
    assert master.asked
    assert not master.keys_shown
    assert (await run(*asked, "--worker-api-key-file", str(tmp_path / "nowhere"), TEXT)).status == 2


@pytest.mark.parametrize(
    ("statuses", "says"),
    [
        ({"/v1/models": 401}, "state the right one with --worker-api-key-file"),
        ({"/v1/models": 500}, "answered no list of models"),
        ({"/v1/models": 404, "/metrics": 404}, "like neither vLLM nor SGLang"),
    ],
)
async def test_a_worker_that_tells_no_model_is_told_why(
    run: Run, worker: ScriptedWorker, asked: tuple[str, ...], statuses: dict[str, int | None], says: str
) -> None:
    worker.pages.statuses = statuses
    worker.pages.models = []
    ended = await run(*asked, TEXT)
    assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert says in ended.err


async def test_a_prompt_is_told_with_where_it_lies(run: Run, master: Master, worker: ScriptedWorker) -> None:
    master.put(TOKENS, 3)
    ended = await run("query", "--store", f"{master.url},tp=2", "--worker", worker.url, TEXT)
    assert (ended.status, ended.err) == (0, "")
    lines = [line.split() for line in ended.out.splitlines()]
    assert ["prompt", "21", "tokens", "of", "tiny,", "5", "full", "blocks", "of", "4"] in lines
    assert ["in", "store", "3", "blocks,", "12", "tokens", "(57%),", "6", "B"] in lines
    missing = LAYOUT.keys((LAYOUT.hashes(TOKENS, Namespace()) or [])[3])[0]
    assert f"missing from block 3 on: {missing}".split() in lines
    assert ["10.0.0.7", "10.0.0.7:7", "6", "6", "B"] in lines
    assert TEXT not in ended.out
    assert not master.listed, "only what is asked for"


async def test_all_of_it_and_nothing_of_it(run: Run, master: Master, asked: tuple[str, ...]) -> None:
    nothing = json.loads((await run(*asked, TEXT)).out)
    assert (nothing["stored_tokens"], nothing["prefill_seconds_saved"], nothing["load_seconds"]) == (0, 0, 0)
    assert nothing["owners"] == []
    master.put(TOKENS, 5)
    found = json.loads((await run(*asked, TEXT)).out)
    assert (found["stored_blocks"], found["stored_tokens"], found["missing_key"]) == (5, 20, None)
    assert found["owners"] == [{"host": "10.0.0.7", "segment": "10.0.0.7:7", "objects": 10, "bytes": 10}]
    assert found["prefill_seconds_saved"] > 0
    assert found["load_seconds"] > 0


async def test_ways_to_give_a_prompt(
    run: Run, master: Master, asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.put(TOKENS, 5)
    text, ids, listed, request, chat = (tmp_path / name for name in ("text", "ids", "listed", "request", "chat"))
    text.write_text(TEXT)
    ids.write_text(json.dumps(TOKENS.tolist()))
    listed.write_text("\n".join(map(str, TOKENS.tolist())))
    request.write_text(json.dumps({"model": "tiny", "prompt": TEXT, "max_tokens": 3}))
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": TEXT}]}))
    ways = [("--file", text), ("--tokens", ids), ("--tokens", listed), ("--request", request), ("--request", chat)]
    for flag, path in ways:
        assert json.loads((await run(*asked, flag, str(path))).out)["stored_tokens"] == 20, flag
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert json.loads((await run(*asked)).out)["stored_tokens"] == 20


async def test_a_salted_request_is_another_prompt(
    run: Run, master: Master, asked: tuple[str, ...], tmp_path: Path
) -> None:
    master.put(TOKENS, 5, Namespace(cache_salt="a"))
    for salt, stored in (("a", 20), ("b", 0)):
        body = tmp_path / salt
        body.write_text(json.dumps({"prompt": TEXT, "cache_salt": salt}))
        assert json.loads((await run(*asked, "--request", str(body))).out)["stored_tokens"] == stored


async def test_what_is_no_prompt(run: Run, asked: tuple[str, ...], tmp_path: Path) -> None:
    bad, negative, empty = tmp_path / "bad", tmp_path / "negative", tmp_path / "empty"
    null, messages = tmp_path / "null", tmp_path / "messages"
    bad.write_text('{"a": 1}')
    negative.write_text("1 -2 3 4")
    empty.write_text("")
    null.write_text('{"prompt": null}')
    messages.write_text('{"messages": "text"}')
    for arguments in (
        ("",),
        ("text", "--file", str(bad)),
        ("--file", str(tmp_path / "nowhere")),
        ("--tokens", str(bad)),
        ("--tokens", str(negative)),
        ("--tokens", str(empty)),
        ("--request", str(bad)),
        ("--request", str(null)),
        ("--request", str(messages)),
    ):
        ended = await run(*asked, *arguments)
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1), arguments


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
async def test_several_prompts(run: Run, asked: tuple[str, ...], tmp_path: Path, prompt: list[object]) -> None:
    body = tmp_path / "body"
    body.write_text(json.dumps({"prompt": prompt}))
    ended = await run(*asked, "--request", str(body))
    assert (ended.status, "2 prompts" in ended.err, ended.err.count("\n")) == (2, True, 1), ended
    body.write_text(json.dumps({"prompt": prompt[:1]}))
    assert (await run(*asked, "--request", str(body))).status == 0


async def test_what_is_no_text(
    run: Run, asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = await run(*asked, "caf\udce9")
    assert (ended.status, ended.err) == (2, "kv-router store: The prompt is not UTF-8 text.\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    assert (await run(*asked)).err == ended.err
    body = tmp_path / "body"
    for fields, says in (
        ('{"prompt": "x", "model": ["tiny"]}', "The request's model is no text."),
        ('{"prompt": "x", "cache_salt": 5}', "The request's cache_salt is no text."),
        ('{"prompt": ' + "[" * 100_000, "The file holds no request's body"),
    ):
        body.write_text(fields)
        ended = await run(*asked, "--request", str(body))
        assert (ended.status, ended.err.count("\n"), says in ended.err) == (2, 1, True), ended.err


async def test_a_worker_that_cannot_tokenise(run: Run, asked: tuple[str, ...], worker: ScriptedWorker) -> None:
    worker.pages.statuses["/tokenize"] = 500
    ended = await run(*asked, TEXT)
    assert (ended.status, "cannot be tokenized" in ended.err) == (1, True)


async def test_a_request_for_a_model_that_is_not_there(
    run: Run, asked: tuple[str, ...], worker: ScriptedWorker, tmp_path: Path
) -> None:
    body = tmp_path / "body"
    body.write_text(json.dumps({"model": "huge", "prompt": TEXT}))
    ended = await run(*asked, "--request", str(body))
    assert (ended.status, "'huge'" in ended.err) == (2, True)
    worker.pages.models.append("other")
    ended = await run(*asked, TEXT)
    assert (ended.status, "2 models" in ended.err) == (2, True)


BLOCKS = [("a0", "a1"), ("b0", "b1"), ("c0", "c1")]


def test_blocks_behind_a_gap_are_of_no_use() -> None:
    objects = {key: Stored(10, Tier.CPU, ("h:1", "h:2")) for block in (BLOCKS[0], BLOCKS[2]) for key in block}
    objects["b1"] = Stored(10, Tier.DISK)
    found = read_found(LAYOUT, 13, BLOCKS, objects, [Segment("10.0.0.1:5", "h:1")])
    assert (found.stored_blocks, found.unreached_blocks, found.missing_key) == (1, 1, "b0")
    assert [(one.host, one.objects, one.bytes) for one in found.owners] == [("10.0.0.1", 2, 20), ("h", 2, 20)]


def test_objects_on_disk_are_nobodys() -> None:
    objects = {key: Stored(10, Tier.DISK) for key in BLOCKS[0]}
    [owner] = read_found(LAYOUT, 4, BLOCKS[:1], objects, []).owners
    assert (owner.host, owner.objects) == ("(disk)", 2)


def test_more_in_the_store_saves_more() -> None:
    objects = {key: Stored(1, Tier.CPU) for block in BLOCKS for key in block}
    saved = [read_found(LAYOUT, 12, BLOCKS, {k: objects[k] for b in BLOCKS[:n] for k in b}, []) for n in range(4)]
    seconds = [one.prefill_seconds_saved for one in saved]
    assert seconds == sorted(set(seconds))


def test_an_adapter_is_asked_for_by_its_base_models_keys() -> None:
    base, adapter = Model("base"), Model("adapter", parent="base")
    assert namespace_of((base, adapter), None, "s") == (base, Namespace(None, "s"))
    assert namespace_of((base, adapter), "adapter", None) == (base, Namespace("adapter", None))
    with pytest.raises(WrongUse):
        namespace_of((base, adapter), "other", None)


async def test_a_file_that_cannot_be_read_is_named_once(run: Run, master: Master) -> None:
    ended = await run("query", "--store", master.url, "--worker", "http://127.0.0.1:1", "--file", "/nowhere")
    assert (ended.status, ended.err) == (2, "kv-router store: /nowhere cannot be read: No such file or directory.\n")
