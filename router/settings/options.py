"""What a setting is: its type, limits and help, and how text becomes its value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

Above0 = Annotated[float, msgspec.Meta(gt=0)]
"""For settings that may be none: limits are those of a number."""

VARIABLE_PREFIX = "ROUTER_"

_SIZE_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


class SettingsError(Exception):
    """One sentence: which flag, variable or key is wrong, and what it takes."""


def read_size(value: object) -> object:
    """Bytes from a number or from text such as "64MiB"; anything else is returned as it is, for the type check."""
    match = re.fullmatch(r"(\d+) ?(KiB|MiB|GiB|)", value) if isinstance(value, str) else None
    return int(match[1]) * _SIZE_UNITS[match[2]] if match else value


def read_bare_host(value: object) -> object:
    """An IPv6 address without the brackets that it has in a URL."""
    return value[1:-1] if isinstance(value, str) and value[:1] + value[-1:] == "[]" else value


def read_none(value: object) -> object:
    return None if value == "none" else value


def read_header(value: object) -> object:
    """ValueError when it is text that is no header's name."""
    if isinstance(value, str):
        check_header(value)
    return read_none(value)


def check_header(name: object) -> None:
    """ValueError when it is no header's name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f"{name!r} is no header's name; give one such as x-session-id.")


def about(
    group: str,
    description: str,
    metavar: str = "",
    *,
    key: str = "",
    takes: str = "",
    read: Callable[[object], object] | None = None,
    **limits: Any,
) -> msgspec.Meta:
    """`key`: the setting's name outside, where it is not the field's. `takes` completes "--flag takes …" where type and
    limits (ge, gt, le, pattern) do not say it; `read` runs before the type check.
    """
    extra = {"group": group, "key": key, "metavar": metavar, "takes": takes, "read": read}
    return msgspec.Meta(description=description, extra=extra, **limits)


def seconds(group: str, description: str) -> msgspec.Meta:
    return about(group, description, "SECONDS", gt=0, takes="a number of seconds above 0")


def memory(group: str, description: str) -> msgspec.Meta:
    takes = "a size of at least 1MiB, such as 512MiB (KiB, MiB, GiB, or a plain number of bytes)"
    return about(group, description, "SIZE", ge=1024**2, takes=takes, read=read_size)


def seconds_or_none(group: str, description: str) -> msgspec.Meta:
    takes = "a number of seconds above 0, or none"
    return about(group, description, "SECONDS", takes=takes, read=read_none)


class Option(NamedTuple):
    """One field of `Settings` as its sources see it."""

    attribute: str
    key: str
    type: Any
    default: object
    meta: msgspec.Meta

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.key.removeprefix("router_").upper()

    @property
    def group(self) -> str:
        return str(self._extra["group"])

    @property
    def help(self) -> str:
        return self.meta.description or ""

    @property
    def metavar(self) -> str:
        choices = self.choices
        return "|".join(choices) if choices else str(self._extra["metavar"])

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def is_list(self) -> bool:
        """Its flag may be repeated."""
        return get_origin(self.type) is tuple

    @property
    def takes(self) -> str:
        """Completes the sentence "--flag takes …"."""
        return str(self._extra["takes"]) or _takes(self)

    @property
    def default_text(self) -> str:
        """The default as one would write it on the command line."""
        value = self.default
        if isinstance(value, bool):
            return str(value).lower()
        if value is None or value == ():
            return "none"
        if self.metavar == "SIZE" and isinstance(value, int):
            unit = max((unit for unit, size in _SIZE_UNITS.items() if value % size == 0), key=_SIZE_UNITS.__getitem__)
            return f"{value // _SIZE_UNITS[unit]}{unit}"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def read(self, value: object, place: str, *, text: bool) -> object:
        """`value` checked; `text`: it came as a string and may be converted. Raises SettingsError naming `place`."""
        shown = value
        read = self._extra["read"]
        try:
            value = read(value) if read else value
        except ValueError as error:
            raise SettingsError(f"{place}: {_without_password(str(error))}") from None
        try:
            checked: object = msgspec.convert(value, Annotated[self.type, self.meta], strict=not text)
        except (msgspec.ValidationError, UnicodeEncodeError):  # the second: of bytes that are no text
            raise self._wrong(shown, place) from None
        if isinstance(checked, float) and not math.isfinite(checked):
            raise self._wrong(shown, place)
        return checked

    def _wrong(self, value: object, place: str) -> SettingsError:
        shown = _without_login(repr(value))
        hint = "" if shown == repr(value) else " (left out: user and password)"
        return SettingsError(f"{place} takes {self.takes}, not {shown}{hint}.")

    @property
    def _extra(self) -> dict[str, Any]:
        return self.meta.extra or {}


def _without_password(text: str) -> str:
    """URLs in it may hold one."""
    return re.sub(r"(?<=//)[^/\s]*@", "", text)


def _without_login(text: str) -> str:
    """Of a value that is no such URL: there a password may hold anything."""
    return re.sub(r"^(\W?[a-z+]*:?//|\W?).*@", r"\1", text)


def _takes(option: Option) -> str:
    if option.choices:
        return f"{', '.join(option.choices[:-1])} or {option.choices[-1]}"
    if option.type is bool:
        return "true or false"
    if option.type is str:
        return "text without blanks"
    low, high = option.meta.ge, option.meta.le
    noun = "a whole number" if option.type is int else "a number"
    return f"{noun} from {low} to {high}" if high is not None else f"{noun} of at least {low}"
