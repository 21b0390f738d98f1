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
from router.http.pool import Pool
from router.settings.serving import Serving
from router.store.shared_store import layout_of
from router.store.spec import StoreSpec, is_address, read_store
from router.store_cli import hot, query, status
from router.store_cli.errors import Away, StoreError, WrongUse
from router.store_cli.peers import TIMEOUT, Master, Peer
from router.store_cli.prompt import read_request, tokenize
from router.workers.spec import parse_worker
from router.workers.watch import describe
from router.workers.worker import Worker

_ROUTER = f"http://{Serving.host}:{Serving.port}"


class Answer(NamedTuple):
    found: status.Status | query.Found | hot.HotFound
    text: str
    """The same for people."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongUse(f"{message}; --help lists every flag")


def make_parser() -> argparse.ArgumentParser:
    about = "Shows what a shared Mooncake Store holds. No question takes a lease, so what is evicted does not change."
    parser = _Parser(prog="kv-router store", description=about, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="status|query|hot")
    of_status = _add(
        commands, "status", "the master, its memory and its keys, and whether the router would ask for such keys"
    )
    of_status.add_argument("--worker", metavar="URL", help="compare the keys with those that this worker writes")
    of_status.add_argument(
        "--list-all", action="store_true", help="list the keys even if there are more than a million"
    )
    of_query = _add(commands, "query", "how much of a prompt is stored, where, and the prefill time that it saves")
    of_query.add_argument(
        "--worker", metavar="URL", required=True, help="worker that uses the store; it tokenizes the prompt"
    )
    for asking in (of_status, of_query):
        asking.add_argument("--worker-api-key-file", metavar="FILE", help="file with the API key of the worker")
    of_query.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text of the prompt (default: read from standard input)"
    )
    of_query.add_argument("--file", metavar="FILE", help="read the prompt's text from FILE")
    of_query.add_argument(
        "--tokens", metavar="FILE", help="read token ids from FILE: a JSON list, or numbers separated by blanks"
    )
    of_query.add_argument(
        "--request", metavar="FILE", help="read a whole request body from FILE: a chat, an adapter, a cache_salt"
    )
    of_hot = _add(commands, "hot", "the prefixes that a router's clients ask for most, and who holds them")
    of_hot.add_argument(
        "--router", metavar="URL", default=_ROUTER, help=f"router that runs with --store (default: {_ROUTER})"
    )
    of_hot.add_argument("--key-file", metavar="FILE", help="file with an admin's API key, for a router with --api-keys")
    return parser


def _add(commands: argparse._SubParsersAction[_Parser], name: str, about: str) -> _Parser:
    parser = commands.add_parser(name, help=about, description=f"Shows {about}.", allow_abbrev=False)
    told = "the master's metrics port, such as http://10.0.0.5:9003, and the keys of the router's --store"
    parser.add_argument("--store", metavar="URL[,key=value...]", required=True, help=told)
    parser.add_argument(
        "--ca",
        metavar="FILE",
        help="authorities (PEM) that sign the certificates of https addresses (default: the system's)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
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
