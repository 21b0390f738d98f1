"""A worker as the operator names it: `URL[,key=value…]` on the command line, a string or a mapping in YAML."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args
from urllib.parse import SplitResult

import msgspec

from engines.description import Role
from engines.disaggregation import CONNECTORS
from engines.endpoints import is_endpoint
from publishers.urls import DEFAULT_PORTS, host_and_port, is_host, split_url

StatedRole = Role | Literal["auto"]

_KEYS = ("url", "events", "replay", "block_size", "role", "connector", "bootstrap_port", "host", "store", "name")
MOST_BLOCK_TOKENS = 2**20
"""More than any context has."""
_BlockSize = Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK_TOKENS)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_EACH = "each worker needs its own --worker (in YAML a line, in ROUTER_WORKER a blank before it)."
_ROLES: dict[object, StatedRole] = {name: name for name in ("auto", *get_args(Role))}


class WorkerSpec(msgspec.Struct, frozen=True):
    """What was stated about one worker; None: to be found out from the engine.

    `url` has no trailing slash. `events` and `replay` are rank 0's ZMQ endpoints, `block_size` is in tokens.
    `connector`: how its KV is moved, a name of `engines.disaggregation.CONNECTORS`; `bootstrap_port`: where that says
    how. `host`: a name that workers share between which KV need not cross a network.
    """

    url: str
    worker_id: str
    events: str | None = None
    replay: str | None = None
    block_size: int | None = None
    role: StatedRole = "auto"
    connector: str | None = None
    bootstrap_port: int | None = None
    host: str | None = None
    store: bool = True


ROLE_FIELDS = ("role", "connector", "bootstrap_port", "host")
"""What may change while the router runs."""


def parse_worker(text: str) -> WorkerSpec:
    """`URL[,key=value…]`; raises ValueError with a sentence that names the part at fault."""
    url, *rest = text.strip().split(",")
    if re.search(r"\s", url):
        raise ValueError(f"{url!r} holds a blank; {_EACH}")
    mapping: dict[str, object] = {"url": url}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} in {text!r} is not key=value; the keys are {', '.join(_KEYS[1:])}; {_EACH}")
        if key in mapping:
            raise ValueError(f"{key} is given twice in {text!r}.")
        mapping[key] = value
    return worker_from_mapping(mapping, strict=False)


def worker_from_mapping(mapping: Mapping[str, object], *, strict: bool = True) -> WorkerSpec:
    """The fields of `WorkerSpec`, and `name`. Not strict: numbers may be text. Raises ValueError."""
    _reject_unknown(mapping)
    if "url" not in mapping:
        raise ValueError("a worker needs a url, such as http://127.0.0.1:8000.")
    url, named = _normalise(_text(mapping, "url") or "")
    return WorkerSpec(
        url=url,
        worker_id=_name(mapping) or named,
        events=_endpoint(mapping, "events"),
        replay=_endpoint(mapping, "replay"),
        block_size=_number(
            mapping,
            "block_size",
            _BlockSize,
            f"number of tokens, at least 1 and at most {MOST_BLOCK_TOKENS}",
            strict=strict,
        ),
        role=_role(mapping.get("role", "auto")),
        connector=_connector(mapping),
        bootstrap_port=_number(mapping, "bootstrap_port", _Port, "number from 1 to 65535", strict=strict),
        host=_text(mapping, "host"),
        store=_flag(mapping, "store", strict=strict),
    )


def read_workers(value: object) -> tuple[WorkerSpec, ...]:
    """Workers from text (separated by white space) or from a list of strings and mappings; raises ValueError."""
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise ValueError(  # noqa: TRY004 - one kind of error for all that an operator may get wrong
            "it takes a list of workers, each a string or a mapping with url."
        )
    workers = tuple(_read_worker(item) for item in items)
    _reject_duplicates("URL", (w.url for w in workers))
    _reject_duplicates("name", (w.worker_id for w in workers))
    return workers


def _read_worker(item: object) -> WorkerSpec:
    if isinstance(item, str):
        return parse_worker(item)
    if isinstance(item, Mapping):
        return worker_from_mapping(item)
    raise ValueError(f"{item!r} is neither a URL nor a mapping with url.")


def _reject_duplicates(what: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            hint = "; tell them apart with name=…" if what == "name" else ""
            raise ValueError(f"two workers have the {what} {value!r}{hint}.")
        seen.add(value)


def _reject_unknown(mapping: Mapping[str, object]) -> None:
    for key in mapping:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_KEYS)}."
            raise ValueError(f"a worker has no {str(key)!r}; {hint}")


def _normalise(text: str) -> tuple[str, str]:
    """(url without a trailing slash, host:port)."""
    try:
        parts = split_url(text)
        _ = parts.port  # raises ValueError for what is no port number
    except ValueError as error:
        raise ValueError(f"{text!r} is not a URL: {error}.") from error
    _check_url(text, parts)
    named = host_and_port(parts)
    return f"{parts.scheme}://{named}{parts.path.rstrip('/')}", named


def _check_url(text: str, parts: SplitResult) -> None:
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or re.search(r"\s", text):
        raise ValueError(f"{text!r} is not an engine's address; it looks like http://HOST:PORT (http or https).")
    if parts.username is not None:
        raise ValueError("a worker's URL must not hold a user or a password: it is shown in logs and metrics.")
    if not is_host(parts.hostname) or parts.port == 0 or not re.fullmatch(r"[!-~]*", parts.path):
        raise ValueError(f"{text!r} holds what no host, port or path can be: they go over the wire as ASCII.")
    if parts.query or parts.fragment:
        raise ValueError(f"{text!r} must not have a ? or # part.")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{text!r} ends in /v1, which the router adds itself; leave it out.")


def _text(mapping: Mapping[str, object], key: str) -> str | None:
    value = mapping.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ValueError(f"a worker's {key} takes text, not {value!r}.")
    return value


def _name(mapping: Mapping[str, object]) -> str | None:
    name = _text(mapping, "name")
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:\[\]-]*", name):
        raise ValueError(f"a worker's name takes letters, digits, '_', '.', ':' and '-', not {name!r}.")
    return name


def _endpoint(mapping: Mapping[str, object], key: str) -> str | None:
    value = _text(mapping, key)
    if value is not None and ("*" in value or not is_endpoint(value)):
        raise ValueError(f"a worker's {key} takes a ZMQ endpoint such as tcp://HOST:5557, not {value!r}.")
    return value


def _number(mapping: Mapping[str, object], key: str, kind: Any, wanted: str, *, strict: bool) -> int | None:
    value = mapping.get(key)
    if value is None:
        return None
    try:
        number: int = msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError:
        raise ValueError(f"a worker's {key} takes a whole {wanted}, not {value!r}.") from None
    return number


def _flag(mapping: Mapping[str, object], key: str, *, strict: bool) -> bool:
    value = mapping.get(key, True)
    if not strict and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        raise ValueError(f"a worker's {key} takes true or false, not {value!r}.")  # noqa: TRY004 -- as everywhere here
    return value


def _role(value: object) -> StatedRole:
    role = _ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        raise ValueError(f"a worker's role takes auto, prefill, decode or both, not {value!r}.")
    return role


def _connector(mapping: Mapping[str, object]) -> str | None:
    name = _text(mapping, "connector")
    if name is None or name in CONNECTORS:
        return name
    near = difflib.get_close_matches(name, CONNECTORS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"a worker's connector takes {', '.join(CONNECTORS)}, not {name!r}{hint}")
