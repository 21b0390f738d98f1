"""Halves of prefill/decode pairs, and the stage on which at most three engines are at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from tests.real.asking import get
from tests.real.fleet import EVENTS_OFFSET, TRANSFER_OFFSET, Engine, Router

Connector = Literal["nixl", "mooncake"]
Role = Literal["prefill", "decode"]

CONNECTORS: tuple[Connector, ...] = ("nixl", "mooncake")
ROLES: tuple[Role, ...] = ("prefill", "decode")
MOST_AT_ONCE = 3
"""Each takes 2.3 GB."""


def total(url: str, metric: str, **labels: str) -> float:
    """Of all of its samples with these labels."""
    samples = re.findall(rf"^{re.escape(metric)}{{(.*)}} (\S+)$", get(f"{url}/metrics").body.decode(), re.MULTILINE)
    wanted = {f'{name}="{value}"' for name, value in labels.items()}
    return sum(float(value) for found, value in samples if wanted <= set(found.split(",")))


class Weighted(Engine):
    """A vLLM under whose weights the whole prompt decides each token."""

    def __init__(self, name: str, logs: Path) -> None:
        super().__init__("vllm", name, logs)

    def _serve(self, name: str, port: int) -> list[str]:
        return ["serve", "--weights", "vllm", name, str(port), str(port + EVENTS_OFFSET)]

    def total(self, metric: str, **labels: str) -> float:
        return total(self.url, metric, **labels)

    def running(self) -> float:
        """Requests, waiting ones too."""
        return self.total("vllm:num_requests_running") + self.total("vllm:num_requests_waiting")

    def fetched(self) -> float:
        """Prompt tokens whose KV came from another engine."""
        return self.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


class Half(Weighted):
    def __init__(self, connector: Connector, role: Role, name: str, logs: Path) -> None:
        self.connector = connector
        self.role = role
        super().__init__(name, logs)

    def _serve(self, name: str, port: int) -> list[str]:
        ports = [port, port + EVENTS_OFFSET, port + TRANSFER_OFFSET]
        return ["serve-pd", self.connector, self.role, name, *map(str, ports)]

    @property
    def worker(self) -> str:
        port = int(self.url.rpartition(":")[2]) + TRANSFER_OFFSET
        bootstrap = f",bootstrap_port={port}" if (self.connector, self.role) == ("mooncake", "prefill") else ""
        return f"{self.url},role={self.role},connector={self.connector}{bootstrap}"


class Scene(NamedTuple):
    """A router and the halves behind it, all up."""

    router: Router
    prefills: list[Half]
    decodes: list[Half]


class Stage:
    """Engines stay up from one test to the next, as far as it needs them."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._plain = Weighted("plain", logs)
        self._halves: dict[str, Half] = {}
        self._up: list[Weighted] = []
        self._router: Router | None = None
        self._behind: list[Half] = []

    def scene(self, connector: Connector, prefills: int = 1, decodes: int = 1) -> Scene:
        """Ends what is not in it but for the plain engine, if that fits. What a test killed is started again."""
        found: dict[Role, list[Half]] = {
            "prefill": [self._half(connector, "prefill", number) for number in range(prefills)],
            "decode": [self._half(connector, "decode", number) for number in range(decodes)],
        }
        halves = [*found["prefill"], *found["decode"]]
        plain = [self._plain] if self._plain in self._up and len(halves) < MOST_AT_ONCE else []
        self._have([*halves, *plain])
        return Scene(self._router_before(halves), found["prefill"], found["decode"])

    def plain(self) -> Weighted:
        """Beside one pair at most."""
        others = [engine for engine in self._up if engine is not self._plain]
        self._have([*others[: MOST_AT_ONCE - 1], self._plain])
        return self._plain

    def end(self) -> None:
        self._end_router()
        self._end_engines(self._up)

    def _half(self, connector: Connector, role: Role, number: int) -> Half:
        name = f"{connector}-{role}-{number}"
        if name not in self._halves:
            self._halves[name] = Half(connector, role, name, self._logs)
        return self._halves[name]

    def _have(self, wanted: list[Weighted]) -> None:
        assert len(wanted) <= MOST_AT_ONCE
        self._end_engines([engine for engine in self._up if engine not in wanted])
        missing = [engine for engine in wanted if not engine.process.runs]
        for engine in missing:
            engine.process.kill()
            engine.process.start()
        self._up = wanted
        for engine in missing:
            engine.wait_until_up()

    def _end_engines(self, engines: Sequence[Weighted]) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda engine: engine.process.stop(), engines))
        self._up = [engine for engine in self._up if engine not in engines]

    def _router_before(self, halves: list[Half]) -> Router:
        if self._router is None or self._behind != halves:
            self._end_router()
            self._router, self._behind = Router("router-pd", halves, self._logs), halves
            self._router.start()
        self._router.until_all_are_up()
        return self._router

    def _end_router(self) -> None:
        if self._router is not None:
            self._router.process.stop()
        self._router = None
