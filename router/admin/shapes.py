"""The JSON that the admin surface takes and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from engines.answers import UNDECODABLE
from router.settings.logs import LogLevel as Level
from router.workers.spec import ROLE_FIELDS, StatedRole, WorkerSpec, worker_from_mapping
from router.workers.status import WorkerStatus

MOST_SECONDS = 86_400.0
"""That a worker may be given to drain: a day."""

_ANY = "http://127.0.0.1"
"""Stands for the worker's URL, which stays."""
_EXACT = 2.0**53
"""Up to here every whole number is a double of its own."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]

_Shape = TypeVar("_Shape")


class Wrong(Exception):
    """A request that cannot be followed; the sentence says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class WorkerState(WorkerStatus, kw_only=True):
    """One worker as it is now."""

    leaves_in_seconds: float | None
    """At most, when it is being removed."""


class Workers(msgspec.Struct):
    """The whole fleet."""

    workers: list[WorkerState]


class Change(msgspec.Struct, forbid_unknown_fields=True):
    """Fields to change; those left out stay as they are."""

    role: StatedRole | UnsetType = UNSET
    connector: str | UnsetType | None = UNSET
    bootstrap_port: int | UnsetType | None = UNSET
    host: str | UnsetType | None = UNSET
    drain: bool | UnsetType = UNSET

    @property
    def stated(self) -> dict[str, Any]:
        """The fields of `WorkerSpec` that are to be otherwise."""
        values = {name: getattr(self, name) for name in ROLE_FIELDS}
        return {name: value for name, value in values.items() if value is not UNSET}


class LogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """Lowest severity that is logged."""

    level: Level


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """The limits that can be changed, all of them; null: no limit."""

    max_queue: Annotated[int, msgspec.Meta(ge=0)]
    queue_timeout: Annotated[float, msgspec.Meta(gt=0)]
    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] | None
    max_worker_concurrency: Annotated[int, msgspec.Meta(ge=1)] | None


class ErrorDetails(msgspec.Struct):
    """As in OpenAI's errors."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(msgspec.Struct):
    """Why not."""

    error: ErrorDetails


def read_worker(body: bytes) -> WorkerSpec:
    """Raises Wrong."""
    stated = _decode(body, dict[str, Any])
    try:
        return worker_from_mapping(stated)
    except ValueError as error:
        raise Wrong(422, f"{error}") from None


def read_change(body: bytes) -> Change:
    """Raises Wrong."""
    change = _decode(body, Change)
    if not change.stated and change.drain is UNSET:
        raise Wrong(422, f"Nothing is to change: state {', '.join(ROLE_FIELDS)} or drain.")
    try:
        worker_from_mapping({"url": _ANY, **change.stated})
    except ValueError as error:
        raise Wrong(422, f"{error}") from None
    return change


def read_log_level(body: bytes) -> Level:
    """Raises Wrong."""
    return _decode(body, LogLevel).level


def read_limits(body: bytes) -> Limits:
    """Raises Wrong."""
    return _decode(body, Limits)


def _decode(body: bytes, shape: type[_Shape]) -> _Shape:
    try:
        decoded = msgspec.json.decode(body)
    except UNDECODABLE as error:
        raise Wrong(400, f"The body is not valid JSON: {error}.") from None
    if isinstance(decoded, dict):
        decoded = {key: _whole(value) for key, value in decoded.items()}
    try:
        return msgspec.convert(decoded, shape)
    except msgspec.ValidationError as error:
        raise Wrong(422, f"The body is not as it should be: {error}{_choices(shape, str(error))}.") from None


def _choices(shape: type, said: str) -> str:
    """What a field takes that is one of a few words: msgspec says only that it was none of them."""
    wrong, _, field = said.rstrip("`").rpartition(" - at `$.")  # the last: what was sent is quoted before it
    if not wrong.startswith("Invalid enum value"):
        return ""
    hint = get_type_hints(shape)[field]
    words = [word for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for word in get_args(kind)]
    return f"; it takes {', '.join(words)}"


def _whole(value: object) -> object:
    """57.0 is a whole number to JSON Schema, and to whatever writes all numbers as floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    return value


def read_timeout(query: Mapping[str, str], usual: float) -> float:
    """Of a removal, in seconds. Raises Wrong."""
    for name in query:
        if name != "timeout":
            raise Wrong(422, f"There is no parameter {name!r}, only timeout.")
    if len(query) > 1:
        raise Wrong(422, "timeout is there more than once.")
    if "timeout" not in query:
        return usual  # the operator's own, which may be longer than a day
    try:
        return msgspec.convert(query["timeout"], Seconds, strict=False)
    except msgspec.ValidationError:
        raise Wrong(422, f"timeout takes a number of seconds from 0 to {MOST_SECONDS:g}.") from None
