"""`kv-router` and `python -m router`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from engines.installation import explain


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status: that of `router.commands`, or 130 when it was interrupted before it serves."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        from publishers.early_ending import end_at_sigterm  # noqa: PLC0415 -- as below
        from publishers.streams import open_standard_streams  # noqa: PLC0415 -- as below

        if not arguments or arguments[0].startswith("-"):  # it serves; a command that is ended has not done well
            end_at_sigterm()
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the settings are yet to be read
        open_standard_streams()
        from router.commands import run  # noqa: PLC0415 -- takes a while, in which Ctrl-C is to print nothing

        return run(arguments)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as missing:
        return explain("kv-router", missing)


if __name__ == "__main__":
    sys.exit(main())
