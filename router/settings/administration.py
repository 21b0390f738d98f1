"""Who may change the router while it runs, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from publishers.urls import is_loopback, split_url
from router.settings.options import SettingsError, about, read_none

_EVERYWHERE = {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound


class Address(msgspec.Struct, frozen=True):
    """Where to listen; port 0 takes a free one."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


def read_address(value: object) -> object:
    """HOST:PORT as an Address, anything else as it is, for the type check."""
    if not isinstance(value, str) or value == "none":
        return read_none(value)
    try:
        parts = split_url(f"//{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return value
    whole = host and port is not None and parts.netloc == value and not parts.username
    return Address(host or "", port or 0) if whole else value


def _meet(host: str, other: str) -> bool:
    """Whether one port cannot be listened on at both. (Names of the same address are found out when it is tried.)"""
    return host == other or not {host, other}.isdisjoint(_EVERYWHERE)


@dataclass(frozen=True, kw_only=True)
class Administration:
    admin_listen: Annotated[
        Address | None,
        about(
            "Administration",
            "Address of the admin surface, an HTTP interface for changing the fleet, the limits and the log level "
            "while the router runs; with none, it does not exist.",
            "HOST:PORT",
            takes="an address such as 127.0.0.1:9090, or none",
            read=read_address,
        ),
    ] = None
    watch_config: Annotated[
        bool,
        about("Administration", "Read the file of --config again whenever its content changes, as SIGHUP does."),
    ] = False

    def check_administration(self, serving: Address, *, processes: int, file: bool, keys: bool) -> None:
        """`serving`: where clients are; `file`: there is a --config; `keys`: who administers must show one. Raises
        SettingsError."""
        listen = self.admin_listen
        if processes > 1 and listen:
            raise SettingsError(
                "--admin-listen needs one process: with --processes each has a fleet of its own. Several read the file "
                "of --config again at SIGHUP, or with --watch-config whenever it has changed."
            )
        if listen and listen.port == serving.port != 0 and _meet(listen.host, serving.host):
            raise SettingsError(f"--admin-listen and --port are both {listen.port}: each needs a port of its own.")
        if self.watch_config and not file:
            raise SettingsError("--watch-config needs a file to watch: name it with --config FILE.")
        if listen and not keys and not is_loopback(listen.host):
            raise SettingsError(
                f"--admin-listen: others may reach {listen.host}, and need no key: give --api-keys, or listen on a "
                "loopback address such as 127.0.0.1."
            )
