"""Parses URLs and checks host names."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from engines.endpoints import url_host

DEFAULT_PORTS = {"http": 80, "https": 443}

_IN_BRACKETS = re.compile(r"([^@]*@)?\[[^\[\]]*\](:[0-9]*)?")


def split_url(url: str) -> SplitResult:
    """As `urllib.parse.urlsplit`, which in some versions drops what stands beside the brackets of an IPv6 address
    (`http://[::1]8000` had no port), and in others refuses it without saying why. Raises ValueError."""
    _check_brackets(re.split("[/?#]", url.partition("//")[2])[0])
    parts = urlsplit(url)
    _check_brackets(parts.netloc)  # line breaks and tabs are gone
    return parts


def _check_brackets(netloc: str) -> None:
    if "[" in netloc and "]" in netloc and not _IN_BRACKETS.fullmatch(netloc):
        raise ValueError("something stands beside the brackets of an IPv6 address")


def host_and_port(parts: SplitResult) -> str:
    """Of an http or https URL: what a worker there is called, where it has no name."""
    return f"{url_host(parts.hostname or '')}:{parts.port or DEFAULT_PORTS[parts.scheme]}"


def is_host(name: str) -> bool:
    """An IP address, or a name that can be looked up: RFC 1035 section 2.3.4, and '_', which containers' names have.
    In lower case."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        labels = name.removesuffix(".").split(".")
        return len(name) <= 253 and all(
            re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", label) for label in labels
        )
    return name.isascii()


def is_bare_host(text: str) -> bool:
    """Whether it is what may stand for a host alone: an IPv6 address with or without its brackets."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return is_host(bare.lower())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches who listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
