"""The parts that a virtual clock drives import no clock and no I/O, directly or through each other."""

from __future__ import annotations

import subprocess
import sys

PURE = (
    "answers",
    "cache",
    "decoding",
    "timing",
    "faults",
    "place",
    "rank",
    "store",
    "transfers",
    "connectors",
    "connectors.base",
    "connectors.mooncake",
    "connectors.nixl",
    "connectors.nixl_push",
    "connectors.sglang",
    "connectors.store",
    "request",
    "scheduler",
    "settings",
    "generation",
    "tokens",
    "flavour",
    "vllm_flavour",
    "sglang_flavour",
)


def test_pure_modules_load_no_io() -> None:
    # In a process of its own: this one has loaded everything already. jinja2 loads asyncio itself, for tokens.
    program = f"""
import sys
for name in {PURE}:
    __import__("engines.sim." + name)
print([name for name in ("aiohttp", "zmq", "uvloop", "nats") if name in sys.modules])
print([name for name in sys.modules if name.startswith("engines.sim.")])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    io, loaded = ran.stdout.splitlines()
    assert io == "[]"
    assert sorted(eval(loaded)) == sorted(f"engines.sim.{name}" for name in PURE)
