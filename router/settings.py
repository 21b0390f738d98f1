"""Every setting, once: flags, `ROUTER_*` variables, YAML keys, `--help` and the reference page are made from this.

A field's `encode_name` is its key in YAML; flag and variable follow from the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from router.arm_spec import read_arms
from router.store_spec import StoreSpec, read_store
from router.worker_spec import WorkerSpec, read_workers

RouterMode = Literal["kv", "round-robin", "random", "least-loaded", "power-of-two", "direct"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
_AtLeast0 = Annotated[float, msgspec.Meta(ge=0)]
_Above0 = Annotated[float, msgspec.Meta(gt=0)]
"""For settings that may be none: limits are those of a number."""

GROUPS = ("Serving", "Routing", "Workers", "Events", "Tokens", "Upstream", "Logs")
VARIABLE_PREFIX = "ROUTER_"

_SIZE_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


class SettingsError(Exception):
    """One sentence: which flag, variable or key is wrong, and what it takes."""


def read_size(value: object) -> object:
    """Bytes from a number or from text such as "64MiB"; anything else is returned as it is, for the type check."""
    match = re.fullmatch(r"(\d+) ?(KiB|MiB|GiB|)", value) if isinstance(value, str) else None
    return int(match[1]) * _SIZE_UNITS[match[2]] if match else value


def _read_none(value: object) -> object:
    return None if value == "none" else value


def _check_arms(value: object) -> object:
    """As it is; ValueError when it is text that names no arms."""
    if isinstance(value, str) and value != "none":
        read_arms(value)
    return _read_none(value)


def _read_header(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_-]+", value):
        raise ValueError(f"{value!r} is no header's name; give one such as x-session-id.")
    return _read_none(value)


def _about(
    group: str,
    description: str,
    metavar: str = "",
    *,
    takes: str = "",
    read: Callable[[object], object] | None = None,
    **limits: Any,
) -> msgspec.Meta:
    """`takes` completes "--flag takes …" where type and limits (ge, gt, le, pattern) do not say it; `read` runs
    before the type check.
    """
    extra = {"group": group, "metavar": metavar, "takes": takes, "read": read}
    return msgspec.Meta(description=description, extra=extra, **limits)


def _seconds(group: str, description: str) -> msgspec.Meta:
    return _about(group, description, "SECONDS", gt=0, takes="a number of seconds above 0")


def _objective(description: str) -> msgspec.Meta:
    takes = "a number of seconds above 0, or none"
    return _about("Routing", description, "SECONDS", takes=takes, read=_read_none)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the router was told. Durations are in seconds, sizes in bytes."""

    host: Annotated[str, _about("Serving", "Address to listen on.", "HOST", pattern=r"^\S+\Z")] = "127.0.0.1"
    port: Annotated[int, _about("Serving", "Port to listen on; 0 takes a free one.", "PORT", ge=0, le=65535)] = 8080
    processes: Annotated[
        int,
        _about(
            "Serving",
            "Router processes that share the port and what they have booked; each has an index of its own.",
            "NUMBER",
            ge=1,
            le=256,
        ),
    ] = 1
    max_body_size: Annotated[
        int,
        _about(
            "Serving",
            "Largest request body; larger ones are answered with 413.",
            "SIZE",
            ge=1,
            takes="a size such as 64MiB (KiB, MiB, GiB, or a plain number of bytes)",
            read=read_size,
        ),
    ] = 64 * 1024**2
    drain_timeout: Annotated[
        float,
        _about(
            "Serving",
            "How long running requests may go on after a signal to stop.",
            "SECONDS",
            ge=0,
            takes="a number of seconds, at least 0",
        ),
    ] = 30.0

    router_mode: Annotated[
        RouterMode,
        _about(
            "Routing",
            "How a worker is chosen. kv weighs cached prefix against load; direct obeys the worker the request names.",
        ),
    ] = "kv"
    kv_policy: Annotated[
        str,
        _about(
            "Routing",
            "What a choice costs in kv mode: auto (predicted seconds, held in the router until a worker is ready), "
            "overlap (weighed prefill and decode tokens), lmetric (prefill tokens times batch), ttft (predicted time "
            "to first token), or the name of an installed policy.",
            "POLICY",
            pattern=r"^[A-Za-z0-9_.-]+\Z",
            takes="auto, overlap, lmetric, ttft, or the name of an installed policy",
        ),
    ] = "auto"
    kv_overlap_score_weight: Annotated[
        _AtLeast0 | None,
        _about(
            "Routing",
            "Weight of prefill work against decode load; 0 balances load only. Stating one means the policy overlap.",
            "WEIGHT",
            takes="a number, at least 0, or none",
            read=_read_none,
        ),
    ] = None
    router_temperature: Annotated[
        float,
        _about(
            "Routing",
            "Randomness of the choice in kv mode: a worker that costs one whole prompt more is exp(-1/TEMPERATURE) "
            "times as likely; 0 takes the lowest cost and breaks ties at random.",
            "TEMPERATURE",
            ge=0,
        ),
    ] = 0.0
    ttft_slo: Annotated[
        _Above0 | None,
        _objective("Predicted time to first token above which a request is refused with 429, in kv mode."),
    ] = None
    tbt_slo: Annotated[
        _Above0 | None,
        _objective("Predicted time between two tokens above which a request is refused with 429, in kv mode."),
    ] = None
    slo_action: Annotated[
        Literal["reject", "queue"],
        _about(
            "Routing",
            "What becomes of a request that would miss an objective: it is refused at once, or queued until it would "
            "not, counted from when it is sent.",
        ),
    ] = "reject"
    slo_patience: Annotated[
        float, _seconds("Routing", "How long a request is queued for, with --slo-action queue, before it is refused.")
    ] = 10.0
    ab: Annotated[
        str | None,
        _about(
            "Routing",
            "Split completions and chats between ways of choosing, to compare them live: an arm is a mode or "
            "kv/POLICY, and gets its weight's share. Other requests keep to --router-mode.",
            "ARM:WEIGHT,ARM:WEIGHT[,...]",
            takes="arms with weights such as kv:90,round-robin:10, or none",
            read=_check_arms,
        ),
    ] = None
    ab_sticky: Annotated[
        str | None,
        _about(
            "Routing",
            "Requests with the same value of this header go to the same arm of --ab; without a value, and by default, "
            "each goes to one at random.",
            "HEADER",
            takes="a header's name such as x-session-id, or none",
            read=_read_header,
        ),
    ] = None
    kv_events: Annotated[
        bool,
        _about(
            "Routing",
            "Learn what each worker holds from its KV events; without them it is predicted from what was sent to it.",
        ),
    ] = True
    approx_ttl: Annotated[
        float, _seconds("Routing", "How long a predicted block counts as held without KV events.")
    ] = 120.0
    index_max_memory: Annotated[
        int,
        _about(
            "Routing",
            "Most memory that each process's index takes; what was not used for longest is forgotten beyond it.",
            "SIZE",
            ge=1024**2,
            takes="a size of at least 1MiB, such as 512MiB (KiB, MiB, GiB, or a plain number of bytes)",
            read=read_size,
        ),
    ] = 4 * 1024**3
    seed: Annotated[
        int | None,
        _about(
            "Routing", "Makes random choices repeatable.", "NUMBER", takes="a whole number, or none", read=_read_none
        ),
    ] = None

    workers: Annotated[
        tuple[WorkerSpec, ...],
        _about(
            "Workers",
            "An engine to route to; repeat the flag for each (ROUTER_WORKER separates them by white space, YAML takes "
            "a list). Keys: events and replay (ZMQ endpoints), block_size (tokens), role (auto, prefill, decode or "
            "both), connector (how it hands KV over), bootstrap_port, host and name.",
            "URL[,KEY=VALUE...]",
            takes="an engine's address such as http://127.0.0.1:8000",
            read=read_workers,
        ),
    ] = msgspec.field(default=(), name="worker")

    store: Annotated[
        StoreSpec | None,
        _about(
            "Workers",
            "The master of a Mooncake Store that the workers share, at its metrics port. Keys: model, hash, hash_seed, "
            "tp, pp, block_size, budget_ms.",
            "URL[,KEY=VALUE...]",
            takes="the master's address such as http://10.0.0.5:9003, or none",
            read=read_store,
        ),
    ] = None

    event_plane: Annotated[
        str,
        _about(
            "Events",
            "How KV events reach the router: local reads the engines' ZMQ sockets itself; nats://HOST:PORT subscribes "
            "to what publishers send (tls://HOST:PORT with encryption); nats+embedded://HOST:PORT also starts that "
            "NATS server.",
            "PLANE",
            pattern=r"^(local|(nats|tls)://\S+|nats\+embedded://\S*)\Z",
            takes="local, nats://HOST:PORT, tls://HOST:PORT or nats+embedded://[HOST][:PORT]",
        ),
    ] = "local"
    event_namespace: Annotated[
        str,
        _about(
            "Events",
            "Keeps fleets that share a NATS server apart; publishers must be given the same.",
            "NAME",
            pattern=r"^[A-Za-z0-9_-]+\Z",
            takes="letters, digits, '_' and '-'",
        ),
    ] = "default"

    tokenizer: Annotated[
        str,
        _about(
            "Tokens",
            "Where the model's tokenizer is: auto looks in the folder the engine reports and in the local Hugging Face "
            "cache; engine asks an engine's /tokenize each time; a PATH is a folder with tokenizer.json; a NAME is "
            "fetched from Hugging Face (nothing else is ever downloaded).",
            "auto|engine|PATH|NAME",
            pattern=r"^\S(.*\S)?\Z",
            takes="auto, engine, a folder with tokenizer.json, or a model's name",
        ),
    ] = "auto"

    connect_timeout: Annotated[float, _seconds("Upstream", "How long connecting to a worker may take.")] = 5.0
    pd_timeout: Annotated[
        float,
        _seconds("Upstream", "How long the prefill or the decode part of a split request may take to begin answering."),
    ] = 300.0
    health_interval: Annotated[float, _seconds("Upstream", "Time between two health checks of a worker.")] = 2.0
    load_interval: Annotated[float, _seconds("Upstream", "Time between two readings of a worker's load.")] = 1.0

    log_level: Annotated[LogLevel, _about("Logs", "Least severity that is logged.")] = "info"
    log_format: Annotated[LogFormat, _about("Logs", "text for people, json for one JSON object per line.")] = "text"


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
    def takes(self) -> str:
        """Completes the sentence "--flag takes …"."""
        return str(self._extra["takes"]) or _takes(self)

    @property
    def default_text(self) -> str:
        return _as_text(self)

    def read(self, value: object, place: str, *, text: bool) -> object:
        """`value` checked; `text`: it came as a string and may be converted. Raises SettingsError naming `place`."""
        shown = value
        read = self._extra["read"]
        try:
            value = read(value) if read else value
        except ValueError as error:
            raise SettingsError(f"{place}: {error}") from None
        try:
            checked: object = msgspec.convert(value, Annotated[self.type, self.meta], strict=not text)
        except msgspec.ValidationError:
            raise self._wrong(shown, place) from None
        if isinstance(checked, float) and not math.isfinite(checked):
            raise self._wrong(shown, place)
        return checked

    def _wrong(self, value: object, place: str) -> SettingsError:
        return SettingsError(f"{place} takes {self.takes}, not {value!r}.")

    @property
    def _extra(self) -> dict[str, Any]:
        return self.meta.extra or {}


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


def _as_text(option: Option) -> str:
    """A default as one would write it on the command line."""
    value = option.default
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == ():
        return "none"
    if option.metavar == "SIZE" and isinstance(value, int):
        unit = max((unit for unit, size in _SIZE_UNITS.items() if value % size == 0), key=_SIZE_UNITS.__getitem__)
        return f"{value // _SIZE_UNITS[unit]}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def options() -> tuple[Option, ...]:
    """Every setting in the order of its declaration."""
    found = []
    for field in msgspec.structs.fields(Settings):
        kind, meta = get_args(field.type)
        found.append(Option(field.name, field.encode_name, kind, field.default, meta))
    return tuple(found)
