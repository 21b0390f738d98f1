"""`kv-sim` and `python -m engines.sim`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engines.installation import explain


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status: that of `engines.sim.process`, or 130 when it was interrupted before."""
    try:
        from engines.sim.process import run  # noqa: PLC0415 -- takes a while, in which Ctrl-C is to print nothing

        return run(argv)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as missing:
        return explain("kv-sim", missing)


if __name__ == "__main__":
    sys.exit(main())
