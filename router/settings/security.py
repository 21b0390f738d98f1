"""Who may ask, and how the router and its peers prove who they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from publishers.urls import is_bare_host
from router.settings.options import about, check_header, read_none

File = Annotated[str, msgspec.Meta(pattern=r"^\S(.*\S)?\Z")]

_OURS = re.compile(
    "authorization|connection|content-length|expect|host|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade"
    "|x-request-id|x-router-.*"
)
"""Headers that the router writes, reads or ends itself: RFC 9110 section 7.6.1, with the customary rest."""
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


def _file(description: str) -> msgspec.Meta:
    return about("Security", description, "FILE", takes="a file's path, or none", read=read_none)


def _read_names(value: object) -> object:
    """Headers in lower case, from a list or from text with blanks between them."""
    names = _read_list(value)
    if not isinstance(names, tuple):
        return names
    for name in names:
        check_header(name)
        if _OURS.fullmatch(name.lower()):
            raise ValueError(f"{name} is the router's own affair, and cannot be named.")
    return tuple(name.lower() for name in names)


def _read_origins(value: object) -> object:
    origins = _read_list(value)
    for origin in origins if isinstance(origins, tuple) else ():
        if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin!r} is no origin; give one as browsers send it, such as https://chat.example.com or "
                "http://localhost:3000 (without a path, in lower case), or * for all."
            )
    return origins


def _read_hosts(value: object) -> object:
    hosts = _read_list(value)
    for host in hosts if isinstance(hosts, tuple) else ():
        if not isinstance(host, str) or not is_bare_host(host):
            raise ValueError(
                f"{host!r} is no host's name or address; give one such as 10.0.0.7, without http:// or a port."
            )
    return hosts


def _read_folders(value: object) -> object:
    folders = _read_list(value)
    for folder in folders if isinstance(folders, tuple) else ():
        if not isinstance(folder, str) or not folder.startswith("/"):
            raise ValueError(f"{folder!r} is no absolute path; give one such as /models.")
    return folders


def _read_list(value: object) -> object:
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, Sequence):
        return value
    return () if list(value) == ["none"] else tuple(value)


@dataclass(frozen=True, kw_only=True)
class Security:
    api_keys: Annotated[
        File | None,
        _file(
            "File with a YAML list of the keys that clients need: the entries that `kv-router keys new NAME` prints. "
            "Without it, anyone who can reach the router can use it. SIGHUP reads it again."
        ),
    ] = None
    protect_metrics: Annotated[
        bool,
        about(
            "Security",
            "With --api-keys, show /metrics and the details on /ready only for keys with `admin: true`.",
        ),
    ] = True
    tls_cert: Annotated[
        File | None, _file("Serve HTTPS with this certificate and its chain (PEM). SIGHUP reads it again.")
    ] = None
    tls_key: Annotated[File | None, _file("The private key of --tls-cert (PEM, not encrypted).")] = None
    tls_client_ca: Annotated[
        File | None,
        _file(
            "Accept only clients with a certificate signed by one of these authorities (PEM). SIGHUP reads them again."
        ),
    ] = None
    worker_ca: Annotated[
        File | None,
        _file(
            "The authorities (PEM) that sign the certificates of https:// workers, in place of the system's. SIGHUP "
            "reads them again."
        ),
    ] = None
    worker_cert: Annotated[
        File | None, _file("The client certificate (PEM) to show to https:// workers. SIGHUP reads it again.")
    ] = None
    worker_key: Annotated[File | None, _file("The private key of --worker-cert (PEM, not encrypted).")] = None
    worker_api_key_file: Annotated[
        File | None,
        _file("File with the API key of the engines. Clients' own keys are then not passed on."),
    ] = None
    nats_creds: Annotated[File | None, _file("File with credentials for NATS (.creds: a JWT and its nkey).")] = None
    nats_nkey_seed: Annotated[File | None, _file("File with the nkey seed for NATS (SU…).")] = None
    nats_ca: Annotated[
        File | None,
        _file("The authorities (PEM) that sign the certificate of a tls:// NATS server, in place of the system's."),
    ] = None
    nats_cert: Annotated[File | None, _file("The client certificate (PEM) to show to a tls:// NATS server.")] = None
    nats_key: Annotated[File | None, _file("The private key of --nats-cert (PEM, not encrypted).")] = None
    pass_header: Annotated[
        tuple[str, ...],
        about(
            "Security",
            "A header that also passes between clients and workers, both ways; repeat the flag for each "
            "(ROUTER_PASS_HEADER separates them by white space, YAML takes a list).",
            "NAME",
            takes="a header's name such as x-session-id",
            read=_read_names,
        ),
    ] = ()
    allowed_origin: Annotated[
        tuple[str, ...],
        about(
            "Security",
            "Let web pages of this origin call the router and read its answers (CORS); repeat the flag for each, * for "
            "all. Without it, browsers let no page of another origin.",
            "ORIGIN",
            takes="an origin such as https://chat.example.com, or *",
            read=_read_origins,
        ),
    ] = ()
    event_host: Annotated[
        tuple[str, ...],
        about(
            "Security",
            "A host besides a worker's own from which KV events are read, if the worker reports that it publishes "
            "there; repeat the flag for each.",
            "HOST",
            takes="a host's name or address",
            read=_read_hosts,
        ),
    ] = ()
    model_folder: Annotated[
        tuple[str, ...],
        about(
            "Security",
            "Read tokenizers from folders that engines name only if they lie below this folder; repeat the flag for "
            "each. Without it, engines may name any folder.",
            "FOLDER",
            takes="an absolute path such as /models",
            read=_read_folders,
        ),
    ] = ()
