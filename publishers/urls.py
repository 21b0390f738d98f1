"""URLs taken apart."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

_IN_BRACKETS = re.compile(r"([^@]*@)?\[[^\[\]]*\](:[0-9]*)?")


def split_url(url: str) -> SplitResult:
    """As `urllib.parse.urlsplit`, which before Python 3.12 drops what stands beside the brackets of an IPv6 address:
    `http://[::1]8000` had no port. Raises ValueError for that too."""
    parts = urlsplit(url)
    if "[" in parts.netloc and not _IN_BRACKETS.fullmatch(parts.netloc):
        raise ValueError("something stands beside the brackets of an IPv6 address")
    return parts
