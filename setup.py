"""Compiles with mypyc what every request, token and event passes, where there is a C compiler: the same code, about
twice as fast (docs/adr/0008-compiled-modules.md). Everything else is in pyproject.toml.

KV_ROUTER_COMPILE=0 leaves it; KV_ROUTER_COMPILE=1 fails where it cannot be done.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

COMPILED = [
    "engines/kv_events.py",
    "engines/numbers.py",
    "engines/sglang/decode.py",
    "engines/vllm/decode.py",
    "indexer/assumed.py",
    "indexer/cursor.py",
    "indexer/handles.py",
    "indexer/hashing.py",
    "indexer/kv_indexer.py",
    "indexer/matches.py",
    "indexer/packed.py",
    "indexer/predicted.py",
    "indexer/prefix_index.py",
    "indexer/removals.py",
    "indexer/sampling.py",
    "publishers/rank.py",
    "publishers/relay.py",
    "publishers/zmq_sequence.py",
    "publishers/zmq_source.py",
    "publishers/zmtp.py",
    "router/context.py",
    "router/events/ingest.py",
    "router/http/chunked.py",
    "router/http/edited.py",
    "router/http/front.py",
    "router/http/messages.py",
    "router/http/pool.py",
    "router/http/protocol.py",
    "router/http/reader.py",
    "router/http/relay.py",
    "router/http/repeated.py",
    "router/http/upstream.py",
    "router/metrics/kv_ages.py",
    "router/metrics/kv_lifecycle.py",
    "router/metrics/tallies.py",
    "router/migration/relay.py",
    "router/model_tokenizers.py",
    "router/openai/any_json.py",
    "router/openai/inference.py",
    "router/predicted_blocks.py",
    "router/prompts.py",
    "router/proxy/attempt.py",
    "router/proxy/exchange.py",
    "router/proxy/legs.py",
    "router/proxy/sending.py",
    "router/proxy/usage.py",
    "router/retry_budget.py",
    "router/routing.py",
    "router/routing_log.py",
    "router/routing_options.py",
    "router/scheduling/admission.py",
    "router/scheduling/auto.py",
    "router/scheduling/backlog.py",
    "router/scheduling/balance.py",
    "router/scheduling/booking.py",
    "router/scheduling/candidates.py",
    "router/scheduling/cheapest.py",
    "router/scheduling/copies.py",
    "router/scheduling/decision.py",
    "router/scheduling/held.py",
    "router/scheduling/lanes.py",
    "router/scheduling/latency.py",
    "router/scheduling/limits.py",
    "router/scheduling/line.py",
    "router/scheduling/load.py",
    "router/scheduling/pass_budget.py",
    "router/scheduling/places.py",
    "router/scheduling/present.py",
    "router/scheduling/queue.py",
    "router/scheduling/scheduler.py",
    "router/server.py",
    "router/tokens/chat_template.py",
    "router/tokens/conversation.py",
    "router/tokens/prompt.py",
    "router/tokens/tokenizer.py",
    "router/uncollected.py",
    "router/workers/breaker.py",
    "router/workers/fleet.py",
    "router/workers/worker.py",
]
"""Modules that numba compiles are not among them."""
MYPY = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
"""The types are checked elsewhere; here only what they say of the modules above counts."""

JOBS = min(os.cpu_count() or 1, 8)
"""Compilers at a time. Each takes up to 150 MB, and mypyc before them a good gigabyte."""
BUILDING = {"bdist", "bdist_wheel", "build", "build_ext", "install"}
"""For other commands pip wants no more than metadata, several times before it builds; or an editable install."""


def extensions() -> list[Extension]:
    wanted = os.environ.get("KV_ROUTER_COMPILE", "")
    if wanted not in {"", "0", "1"}:
        sys.exit(f"KV_ROUTER_COMPILE takes 0 or 1, not {wanted!r}.")
    if wanted == "0" or not BUILDING.intersection(sys.argv) or not (wanted or _can_compile()):
        return []
    try:
        from mypyc.build import mypycify  # noqa: PLC0415 -- not needed to install without
    except ImportError as error:  # what is to be built with was left to whoever asked for --no-build-isolation
        if wanted:
            sys.exit(f"KV_ROUTER_COMPILE=1 needs mypy to build with: {error}.")
        sys.stderr.write(f"warning: there is no mypy to build with, so the router runs uncompiled: {error}\n")
        return []
    made = mypycify([*MYPY, *COMPILED], opt_level="3", debug_level="0", multi_file=True, group_name="kv_router")
    for extension in made:
        extension.extra_compile_args.append("-fvisibility=hidden")  # calls between the files are then direct
    return list(made)


class OfThisTree(build):
    """An earlier build of this checkout may have left modules that are no more, which would be installed too."""

    def run(self) -> None:
        if Path(self.build_base) in Path(self.build_lib).parents:  # unless it was named, with whatever else is there
            self._remove_stale(Path(self.build_lib))
        super().run()

    def _remove_stale(self, built: Path) -> None:
        command = self.get_finalized_command("build_ext")
        compiled = {Path(command.get_ext_fullpath(each.name)) for each in self.distribution.ext_modules or ()}
        for path in built.rglob("*"):
            if path.is_file() and path not in compiled and not path.relative_to(built).exists():
                path.unlink()


class AllOrNone(build_ext):
    """Where the compiler fails, as it does without memory enough, the package runs uncompiled.

    Each compiled module takes its code from one that all share: with some of them there and that one not, none could be
    imported.
    """

    def build_extensions(self) -> None:
        self.parallel = self.parallel or JOBS
        self.compiler.compile = partial(_compile_together, self.compiler.compile)
        try:
            super().build_extensions()
        except (BaseError, CCompilerError) as error:
            if os.environ.get("KV_ROUTER_COMPILE"):
                raise
            self.warn(f"the compiler failed, so the router runs uncompiled: {error}")
            for extension in self.extensions:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            self.extensions = []


def _compile_together(
    compile_one: Callable[..., list[str]], sources: list[str], *args: Any, **options: Any
) -> list[str]:
    """What a compiler of setuptools does one source after the other: the files that it makes of them."""
    with ThreadPoolExecutor(JOBS) as threads:
        made = threads.map(lambda source: compile_one([source], *args, **options), sources)
        return [path for each in made for path in each]


def _can_compile() -> bool:
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"  # as setuptools finds it
    return bool(shutil.which(compiler.split()[0])) and (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build": OfThisTree, "build_ext": AllOrNone})
