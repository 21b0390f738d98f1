"""Children of a test: a simulated fleet, a router, publishers. Each is ended by its own pid, whatever happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests.real.eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0

T = TypeVar("T")


def get(url: str) -> tuple[int, str]:
    """(status, body)"""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class Child:
    """`python -m MODULE ARGUMENTS…`, with its log in a file."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        log: Path,
        variables: Mapping[str, str] | None = None,
        redirected: str = "",
    ) -> None:
        """`redirected`: as the shell's redirections after a command, to be done last."""
        self._log = log / f"{module}-{len(list(log.iterdir()))}.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUTER_")}
        with self._log.open("wb") as error:
            self.process = subprocess.Popen(
                ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**environment, **(variables or {}), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=error,
                text=True,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            sys.stderr.write(f"--- {self._log.name}\n{self.log}\n")
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def first_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        return line

    def ended(self) -> int:
        """Its exit status, when it has ended of itself."""
        return self.process.wait(PATIENCE)


class Sim(Child):
    """A fleet that computes fast, unless told otherwise."""

    def __init__(self, *arguments: str, log: Path, workers: int = 2) -> None:
        super().__init__("engines.sim", "--workers", str(workers), "--port", "0", *arguments, log=log)
        self.urls: list[str] = []

    def __enter__(self) -> Sim:
        self.urls = json.loads(self.first_line())["workers"]
        return self

    @property
    def ids(self) -> list[str]:
        return [url.removeprefix("http://") for url in self.urls]


class Router(Child):
    def __init__(self, urls: list[str], *arguments: str, log: Path) -> None:
        workers = [part for url in urls for part in ("--worker", url)]
        super().__init__("router", "--port", "0", *workers, *arguments, log=log)
        self.url = ""

    def __enter__(self) -> Router:
        match = re.fullmatch(r"Listening on (http://\S+)\n", self.first_line())
        assert match
        self.url = match[1]
        return self

    def ready(self) -> dict[str, Any]:
        """What /ready tells of each worker."""
        workers = json.loads(get(f"{self.url}/ready")[1])["workers"]
        return {worker["id"]: worker for worker in workers}

    def metric(self, name: str, **labels: str) -> float:
        lines = get(f"{self.url}/metrics")[1].splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in lines if re.match(rf"{name}(\{{| )", line) and all(each in line for each in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def blocks(self, worker: str) -> int:
        """Blocks that the index knows at `worker`."""
        return sum(rank["blocks"]["gpu"] for rank in self.ready()[worker]["ranks"])

    def until_view(self, view: str) -> None:
        """Every worker is up and seen like this by the index."""
        eventually(
            self.ready,
            lambda workers: all(
                worker["up"] and rank["index"] == view for worker in workers.values() for rank in worker["ranks"]
            ),
        )

    def is_at_rest(self) -> bool:
        names = ("router_requests_in_flight", "router_load_prefill_tokens", "router_load_active_tokens")
        return not any(self.metric(name) for name in names)


def wait_for(look: Callable[[], T], accept: Callable[[T], object] = bool) -> T:
    return eventually(look, accept, within=PATIENCE)
