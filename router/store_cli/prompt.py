"""The prompt that is asked about, from wherever it comes, as the request that it would be."""

from __future__ import annotations

import sys
from argparse import Namespace as Arguments
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engines.description import EngineDescription
from router.store_cli.errors import Away, WrongUse
from router.store_cli.peers import Peer
from router.tokens import CannotTokenize, EngineTokens

_T = TypeVar("_T", str, list[int])


def read_request(arguments: Arguments) -> dict[str, Any]:
    """Its fields. WrongUse for more than one prompt, or none that can be read."""
    if sum(given is not None for given in (arguments.prompt, arguments.file, arguments.tokens, arguments.request)) > 1:
        raise WrongUse("One prompt at a time: as an argument, or by --file, --tokens, --request or standard input.")
    if arguments.tokens is not None:
        return {"prompt": _some(_ids(_read(arguments.tokens)))}
    if arguments.request is not None:
        return _request(_read(arguments.request))
    text = arguments.prompt if arguments.file is None else _read(arguments.file)
    return {"prompt": _prompt(text)}


def _prompt(text: str | None) -> str:
    """As given, else from standard input."""
    try:
        prompt = sys.stdin.read() if text is None else text
        prompt.encode()  # other bytes come as half of a pair, or not at all
    except UnicodeError:
        raise WrongUse("The prompt is not UTF-8 text.") from None
    return _some(prompt)


def _some(prompt: _T) -> _T:
    if not prompt:
        raise WrongUse("The prompt is empty.")
    return prompt


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise WrongUse(f"{path} is not a text file.") from None


def _ids(text: str) -> list[int]:
    """As JSON, or with spaces between."""
    listed = text if text.lstrip().startswith("[") else f"[{','.join(text.split())}]"
    try:
        return msgspec.json.decode(listed, type=list[int])
    except msgspec.DecodeError as error:
        raise WrongUse(f"The file holds no token ids: {error}.") from None


def _request(text: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WrongUse(f"The file holds no request's body: {error}.") from None
    if "prompt" not in fields and "messages" not in fields:
        raise WrongUse("The request has neither a prompt nor messages.")
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        raise WrongUse(f"The request has {len(prompt)} prompts: ask about one at a time.")
    for name in ("model", "cache_salt"):
        if not isinstance(fields.get(name), str | None):
            raise WrongUse(f"The request's {name} is no text.")
    return fields


async def tokenize(worker: Peer, description: EngineDescription, fields: Mapping[str, Any]) -> list[int]:
    """As the worker itself does it; token ids are left as they are."""

    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        return await worker.ask("POST", path, body)

    try:
        tokens = EngineTokens(description.kind, post, description.version)
        ids = await tokens.ids("chat" if "messages" in fields else "completions", fields)
    except CannotTokenize as error:
        wrong = Away if error.reason == "engine" else WrongUse  # else nobody was asked
        raise wrong(f"The prompt cannot be tokenized: {error}.") from None
    if not all(0 <= one < 2**32 for one in ids):
        raise WrongUse("The prompt holds a number that is no token id.")
    return ids
