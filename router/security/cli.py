"""`kv-router keys new NAME`: makes a key, which is shown this once, and the entry that goes into the file."""

from __future__ import annotations

import argparse
import sys

import msgspec

from engines.command_line import Parser
from publishers.streams import leads_nowhere
from router.security.keys import Key, new_key

_DESCRIPTION = """\
Makes an API key. The key itself goes to standard output, once: the router keeps only its digest. The entry for the file
of --api-keys goes to standard error."""


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for a name that cannot be one. Raises OSError if the key cannot be shown."""
    options = make_parser().parse_args(argv)
    if leads_nowhere(sys.stdout):
        raise OSError("standard output is closed, where the key would be shown, once: none was made")
    key, digest = new_key()
    try:
        msgspec.convert({"name": options.name, "sha256": digest}, Key)
    except msgspec.ValidationError:
        sys.stderr.write("kv-router keys: a name takes letters, digits, '_', '.' and '-', 64 at most.\n")
        return 2
    print(key, flush=True)  # noqa: T201 - an OSError comes before the entry of a key that nobody has
    admin = "  admin: true\n" if options.admin else ""
    sys.stderr.write(f'- name: "{options.name}"\n  sha256: {digest}\n{admin}')
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="kv-router keys", description=_DESCRIPTION, allow_abbrev=False)
    new = parser.add_subparsers(required=True).add_parser("new", help="Make a key.", allow_abbrev=False)
    new.add_argument("name", metavar="NAME", help="The tenant that the key is for.")
    new.add_argument(
        "--admin", action="store_true", help="The key also opens /metrics, all of /ready and the admin surface."
    )
    return parser
