"""The command line of scripts/real-engines."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from .install import CannotInstall, install
from .model import make_model
from .pair import CONNECTORS, ROLES, Half
from .places import engines_folder
from .serve import CannotServe, serve, serve_half, serve_master, serve_member, serve_segment
from .store import Member

PARTS = ("vllm", "sglang", "mooncake", "pd")
WEIGHTS = "fixed random weights instead of dummy ones: then the whole prompt decides each token"


def main() -> int:
    args = _parser().parse_args()
    try:
        _run(args)
    except (CannotInstall, CannotServe) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode or 1
    return 0


def _run(args: argparse.Namespace) -> None:
    if args.command == "install":
        for part in PARTS if "all" in args.parts else dict.fromkeys(args.parts):
            install(part)
    elif args.command == "model":
        make_model(args.folder, weights=args.weights)
    elif args.command == "serve":
        serve(args.engine, args.name, args.port, args.events_port, args.engine_args, weights=args.weights)
    elif args.command == "serve-pd":
        half = Half(args.connector, args.role, args.transfer_port)
        serve_half(half, args.name, args.port, args.events_port, args.engine_args)
    elif args.command == "serve-store":
        serve_member(Member(args.master_port), args.name, args.port, args.events_port, args.engine_args)
    elif args.command == "store-master":
        serve_master(args.rpc_port, args.http_port, args.engine_args)
    elif args.command == "store-segment":
        serve_segment(args.host, args.rpc_port, args.megabytes)
    else:
        print(engines_folder())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/real-engines", description="Real engines on a CPU, for tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    part = commands.add_parser("install", help="install what is missing or out of date; a second run does nothing")
    part.add_argument("parts", nargs="*", default="all", choices=[*PARTS, "all"], metavar="vllm|sglang|mooncake|pd|all")
    model = commands.add_parser("model", help="write a tiny model (configuration and tokenizer) to FOLDER")
    model.add_argument("--weights", action="store_true", help=f"{WEIGHTS}, in model.safetensors")
    model.add_argument("folder", type=Path, metavar="FOLDER")
    _add_serve(commands.add_parser("serve", help="run an engine in the foreground; SIGTERM ends it"))
    _add_serve_pd(commands.add_parser("serve-pd", help="run one half of a prefill/decode pair of vLLMs, with weights"))
    _add_serve_store(commands.add_parser("serve-store", help="run a vLLM that shares its blocks, with weights"))
    _add_master(commands.add_parser("store-master", help="run the master of a Mooncake Store"))
    _add_segment(commands.add_parser("store-segment", help="offer memory to a store, and nothing else"))
    commands.add_parser("path", help="print the folder that holds the engines' environments")
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", action="store_true", help=f"{WEIGHTS}, as the pairs have them")
    parser.add_argument("engine", choices=["vllm", "sglang"])
    _add_name_and_ports(parser)
    _add_engine_args(parser)


def _add_serve_pd(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("connector", choices=CONNECTORS)
    parser.add_argument("role", choices=ROLES)
    _add_name_and_ports(parser)
    parser.add_argument(
        "transfer_port", type=int, help="NIXL's side channel, or the bootstrap server of Mooncake's prefill"
    )
    _add_engine_args(parser)


def _add_serve_store(parser: argparse.ArgumentParser) -> None:
    _add_name_and_ports(parser)
    parser.add_argument("master_port", type=int, help="the RPC port of the store's master")
    _add_engine_args(parser)


def _add_master(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rpc_port", type=int, help="for the engines, on 127.0.0.1")
    parser.add_argument("http_port", type=int, help="metrics and queries, on 127.0.0.1")
    _add_engine_args(parser)


def _add_segment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("host", help="an address of this machine, under which others find it")
    parser.add_argument("rpc_port", type=int, help="of the store's master, on 127.0.0.1")
    parser.add_argument("--megabytes", type=int, default=256, help="default: 256")


def _add_name_and_ports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the worker's name in its event topic, kv@NAME@tiny")
    parser.add_argument("port", type=int, help="HTTP, on 127.0.0.1")
    parser.add_argument("events_port", type=int, help="KV events; their replay is on this port plus 100")


def _add_engine_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine_args", nargs=argparse.REMAINDER, help="for the engine; they win over the defaults")
