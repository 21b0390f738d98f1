"""The command line of `python -m router store`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import NamedTuple, NoReturn

import aiohttp
import msgspec

from engines import problems
from publishers.credentials import client_context, make_session, read_key
from router.fleet import Worker
from router.http.pool import Pool
from router.settings.serving import Serving
from router.shared_store import layout_of
from router.store_cli import hot, query, status
from router.store_cli.errors import Away, StoreError, WrongUse
from router.store_cli.peers import TIMEOUT, Master, Peer
from router.store_cli.prompt import read_request, tokenize
from router.store_spec import StoreSpec, is_address, read_store
from router.watch import describe
from router.worker_spec import parse_worker

_ROUTER = f"http://{Serving.host}:{Serving.port}"


class Answer(NamedTuple):
    found: status.Status | query.Found | hot.HotFound
    text: str
    """The same for people."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongUse(f"{message}; --help lists every flag")


def make_parser() -> argparse.ArgumentParser:
    about = "What a shared Mooncake Store has. Nothing that is asked takes a lease, or changes what is evicted."
    parser = _Parser(prog="kv-router store", description=about, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="status|query|hot")
    of_status = _add(commands, "status", "the master, its memory and its keys; whether they are named as expected")
    of_status.add_argument("--worker", metavar="URL", help="compare with what this worker writes")
    of_status.add_argument("--list-all", action="store_true", help="list more than a million keys, too")
    of_query = _add(commands, "query", "how much of one prompt is there, where, and what that is worth")
    of_query.add_argument("--worker", metavar="URL", required=True, help="makes tokens of the prompt; uses the store")
    for asking in (of_status, of_query):
        asking.add_argument("--worker-api-key-file", metavar="FILE", help="holds the key that the worker wants")
    of_query.add_argument("prompt", nargs="?", metavar="PROMPT", help="its text (default: standard input)")
    of_query.add_argument("--file", metavar="FILE", help="its text is in FILE")
    of_query.add_argument("--tokens", metavar="FILE", help="its token ids are in FILE: as JSON, or with spaces between")
    of_query.add_argument("--request", metavar="FILE", help="a request's whole body: a chat, an adapter, a cache_salt")
    of_hot = _add(commands, "hot", "the prefixes that are asked for most, and where they lie")
    of_hot.add_argument("--router", metavar="URL", default=_ROUTER, help=f"one with --store (default: {_ROUTER})")
    of_hot.add_argument("--key-file", metavar="FILE", help="an admin's API key for it, where it asks for one")
    return parser


def _add(commands: argparse._SubParsersAction[_Parser], name: str, about: str) -> _Parser:
    parser = commands.add_parser(name, help=about, description=f"Tells {about}.", allow_abbrev=False)
    told = "the master's metrics port, such as http://10.0.0.5:9003, with what else the router is told of it"
    parser.add_argument("--store", metavar="URL[,key=value...]", required=True, help=told)
    parser.add_argument("--ca", metavar="FILE", help="authorities that https addresses are checked against, as PEM")
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def main(argv: list[str]) -> int:
    """Exit status: 2 for wrong use, 1 when the store or another does not answer."""
    try:
        arguments = make_parser().parse_args(argv)
        answer = asyncio.run(_answer(arguments, _spec(arguments.store)))
    except StoreError as error:
        sys.stderr.write(f"kv-router store: {error}\n")
        return error.status
    text = msgspec.json.encode(answer.found).decode() if arguments.json else answer.text
    sys.stdout.write(f"{text}\n")
    return 0


def _spec(text: str) -> StoreSpec:
    try:
        spec = read_store(text)
    except ValueError as error:
        raise WrongUse(str(error)) from None
    if not isinstance(spec, StoreSpec):
        raise WrongUse("There is no store to ask: --store takes http://HOST:PORT[,key=value...].")
    return spec


def _key(flag: str, path: str | None) -> str | None:
    try:
        return read_key(flag, path) if path else None
    except ValueError as error:
        raise WrongUse(str(error)) from None


def _session(arguments: argparse.Namespace) -> aiohttp.ClientSession:
    """The worker alone is shown its key."""
    key, worker = None, []
    if arguments.command != "hot" and arguments.worker:
        key = _key("--worker-api-key-file", arguments.worker_api_key_file)
        worker = [arguments.worker.partition(",")[0]]
    try:
        context = client_context("-", arguments.ca, None, None)
    except ValueError as error:
        raise WrongUse(str(error)) from None
    return make_session(lambda: worker, key, context)


async def _answer(arguments: argparse.Namespace, spec: StoreSpec) -> Answer:
    async with _session(arguments) as session:
        master = Master(session, spec.url)
        if arguments.command == "hot":
            found = await hot.hot(master, _router(session, arguments))
            return Answer(found, hot.show(found))
        if arguments.command == "query":
            prompt = await _query(arguments, spec, session, master)
            return Answer(prompt, query.show(prompt))
        worker = await _worker(session, arguments.worker) if arguments.worker else None
        told = await status.status(master, spec, worker, list_all=arguments.list_all)
        return Answer(told, status.show(told))


def _router(session: aiohttp.ClientSession, arguments: argparse.Namespace) -> Peer:
    if not is_address(arguments.router):
        raise WrongUse(f"--router takes a router's address such as {_ROUTER}, not {arguments.router!r}.")
    return Peer(session, "The router", arguments.router, _key("--key-file", arguments.key_file))


async def _query(
    arguments: argparse.Namespace, spec: StoreSpec, session: aiohttp.ClientSession, master: Master
) -> query.Found:
    fields = read_request(arguments)
    worker = await _worker(session, arguments.worker)
    model, namespace = query.namespace_of(worker.models, fields.get("model"), fields.get("cache_salt"))
    layout = layout_of(worker, model, spec)
    if layout is None or worker.description is None:
        raise WrongUse(f"{arguments.worker} is neither vLLM nor SGLang: what its keys are called is not known.")
    peer = Peer(session, "The worker", worker.spec.url)
    tokens = await tokenize(peer, worker.description, {"model": model.id, **fields})
    return await query.query(master, layout, tokens, namespace)


async def _worker(session: aiohttp.ClientSession, text: str) -> Worker:
    """Described."""
    try:
        spec = parse_worker(text)
    except ValueError as error:
        raise WrongUse(str(error)) from None
    worker = Worker(spec, Pool(spec.url, TIMEOUT))
    worker.description = await describe(session, worker)
    if problems.NO_ANSWER in worker.description.problems:
        await Peer(session, "The worker", spec.url).ask("GET", "/v1/models")  # tells why, if it still does not
        raise Away(f"The worker does not answer at {spec.url}.")
    if not worker.models:
        raise Away(worker.description.problems[0])  # which is why
    return worker
