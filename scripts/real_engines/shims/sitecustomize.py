"""Loaded by Python itself in each process of an engine that shares its KV, as this folder is on its PYTHONPATH.

Changes modules once they are imported, so that such engines work on two cores and no accelerator. No result depends on
the pauses: without them the engines spin, four processes on two cores, and a request takes up to 30 s."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PROGRESS_DELAY_US = 1000
YIELD_S = 0.0002


class AfterImport(MetaPathFinder):
    """Runs `change` on a module right after its own code has run."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), self._change(module))[0]  # type: ignore[method-assign]
        return spec


def wait_in_progress_thread(api: ModuleType) -> None:
    """NIXL's Python API fixes the delay of UCX's progress thread at 0, and that thread then polls without a pause."""
    make = api.nixlBind.nixlAgent

    def agent(name: str, config: object) -> object:
        config.pthrDelay = PROGRESS_DELAY_US  # type: ignore[attr-defined]
        return make(name, config)

    api.nixlBind.nixlAgent = agent


def say_that_device_is_zero(connector: ModuleType) -> None:
    """Mooncake's connector asks for the accelerator's number, and there is none."""
    connector.torch.accelerator.current_device_index = lambda: 0


class NothingToWaitFor:
    """In place of an accelerator's event: on a CPU all that was asked for is done."""

    def record(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def need_no_events(worker: ModuleType) -> None:
    """Mooncake's store connector waits for an accelerator's event before it reads the KV."""
    worker.torch.cuda.Event = NothingToWaitFor


def sleep_when_yielding() -> None:
    """vLLM's queues in shared memory yield the processor in a loop for a second after each message."""
    os.sched_yield = lambda: time.sleep(YIELD_S)


sleep_when_yielding()
MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"
sys.meta_path[:0] = [
    AfterImport("nixl_cu12._api", wait_in_progress_thread),
    AfterImport(f"{MOONCAKE}.mooncake_connector", say_that_device_is_zero),
    AfterImport(f"{MOONCAKE}.store.worker", need_no_events),
]
