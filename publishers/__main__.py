"""`kv-publisher` and `python -m publishers`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engines.installation import explain


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status: that of `publishers.process`, or 130 when it was interrupted before."""
    try:
        from publishers.early_ending import end_at_sigterm  # noqa: PLC0415 -- as below
        from publishers.streams import open_standard_streams  # noqa: PLC0415 -- as below

        end_at_sigterm()
        open_standard_streams()
        from publishers.process import run  # noqa: PLC0415 -- takes a while, in which Ctrl-C is to print nothing

        return run(argv)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as missing:
        return explain("kv-publisher", missing)


if __name__ == "__main__":
    sys.exit(main())
