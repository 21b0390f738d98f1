"""The command line: `scripts/bench/run [--quick] [PART ...]`."""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack

from .measure import Effort, cpu_per_request
from .pairs import ratio
from .routers import Field, fleet, ours, vllm_router


def main() -> int:
    effort = Effort(3, 1.5) if "--quick" in sys.argv else Effort(7, 5.0)
    with ExitStack() as stack:
        workers = stack.enter_context(fleet(4))
        field = Field(stack)
        field.add("ours", ours("round-robin", workers))
        field.add("vllm-router", vllm_router("round_robin", workers))
        for workload in ("short", "long", "stream"):
            found = cpu_per_request(field.running, workload, effort)
            names = list(found)
            for name in names[1:]:
                print(
                    workload,
                    name,
                    round(statistics.median(found[names[0]])),
                    round(statistics.median(found[name])),
                    ratio(found[names[0]], found[name]),
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
