"""Reads the settings: a flag wins over a variable, a variable over the file, the file over the default."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from engines.command_line import version_of
from publishers.pipes import is_pipe
from router.settings import GROUPS, VARIABLE_PREFIX, Option, Settings, SettingsError, options
from router.settings.administration import Address
from router.yaml_text import NotYaml, read_yaml

_log = logging.getLogger(__name__)

CONFIG_FLAG, CONFIG_VARIABLE = "--config", "ROUTER_CONFIG"
_ALL = "; --help lists all."
_ELSEWHERE = "; --help lists all, docs/coming-from.md the counterparts of other routers' flags."
_THEIRS = {"--policy": "--router-mode"}
"""Flags of other routers whose names are like that of another flag here."""
_KUBERNETES_LINKS = ("ROUTER_SERVICE_", "ROUTER_PORT_")

_DESCRIPTION = """\
A KV-aware request router: an OpenAI-compatible proxy that sends each request to the worker that already holds most of
its prefix and has room for the rest.

Other commands, each with a --help of its own: ab (compares routing modes on engines), simulate (compares policies in
virtual time, without engines), store (shows what a shared store holds), keys (makes API keys), compile (compiles ahead
of the first start)."""

_EPILOG = """\
Every flag --some-name is also a variable ROUTER_SOME_NAME and a YAML key some_name (a leading "router" is not doubled:
ROUTER_MODE). A flag overrides a variable, a variable the file, the file the default."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message[:1].upper()}{message[1:]}; --help lists every flag.")


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings in force. Raises SettingsError; `--help` and `--version` print and raise SystemExit(0).

    Unknown variables are logged as warnings: Kubernetes sets some of its own for a service named `router`.
    """
    flags = _parse_flags(argv)
    file = _config_file(flags, environ)
    values = _from_file(file, CONFIG_FLAG if "config" in flags else CONFIG_VARIABLE) if file else {}
    values |= _from_variables(environ)
    values |= _from_flags({key: value for key, value in flags.items() if key != "config"})
    settings = Settings(**values)
    if not settings.workers and settings.admin_listen is None:
        raise SettingsError("There is no worker to route to; name each with --worker http://HOST:PORT.")
    keys = settings.api_keys is not None
    watchable = file is not None and not is_pipe(file)
    serving = Address(settings.host, settings.port)
    settings.check_administration(serving, processes=settings.processes, file=watchable, keys=keys)
    return settings


class Source(NamedTuple):
    """Where the settings come from, to read them anew."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    decided: Mapping[str, tuple[Any, Any]] = MappingProxyType({})
    """By attribute: what was stated at the start, and what was decided then, which stands for as long as the former is
    stated."""

    def read(self) -> Settings:
        """Raises SettingsError."""
        read = load_settings(self.argv, self.environ)
        stand = {name: value for name, (stated, value) in self.decided.items() if getattr(read, name) == stated}
        return replace(read, **stand)

    def read_again(self) -> Settings:
        """Raises SettingsError."""
        if self.file and is_pipe(self.file):
            raise SettingsError(f"{self.file} is a pipe: what it held is gone; name a file to have it read again.")
        return self.read()

    @property
    def file(self) -> Path | None:
        return _config_file(_parse_flags(self.argv), self.environ)


def _config_file(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """An empty variable counts as not set. An empty flag is the folder here, which cannot be read: a shell's variable
    may be missing, and with it the API keys."""
    name = flags.get("config", environ.get(CONFIG_VARIABLE) or None)
    return None if name is None else Path(name)


def make_parser() -> argparse.ArgumentParser:
    """Flags only: values stay text, so that every source is checked by the same code."""
    parser = _Parser(
        prog="kv-router",
        usage="kv-router --worker URL [--worker URL ...] [FLAGS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
        exit_on_error=False,
    )
    general = parser.add_argument_group("General")
    general.add_argument("-h", "--help", action="help", help="Show this text and exit.")
    general.add_argument("--version", action="version", version=version(), help="Show the version and exit.")
    general.add_argument(
        CONFIG_FLAG, metavar="FILE", default=argparse.SUPPRESS, help=f"YAML file with settings ({CONFIG_VARIABLE})."
    )
    for group in GROUPS:
        section = parser.add_argument_group(group)
        for option in options():
            if option.group == group:
                _add_flag(section, option)
    return parser


def _add_flag(section: argparse._ArgumentGroup, option: Option) -> None:
    text = f"{option.help} (default: {option.default_text})".replace("%", "%%")
    common: dict[str, Any] = {"dest": option.key, "help": text, "default": argparse.SUPPRESS}
    if option.is_switch:
        section.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
        return
    action = "append" if option.is_list else "store"
    section.add_argument(option.flag, metavar=option.metavar, action=action, **common)


def _parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    try:
        flags, unknown = make_parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        takes = {option.flag: f"takes {option.takes}" for option in options() if not option.is_switch}
        name = error.argument_name or "A flag"
        if (flag := name.partition("/")[0]) in _switches():
            raise _takes_no_value(flag) from None
        raise SettingsError(f"{name} {takes.get(name, 'is used wrongly')}: {error.message}.") from None
    if unknown:
        raise _unknown(unknown[0], argv)
    return vars(flags)


def _switches() -> dict[str, str]:
    """Both forms of each flag that takes no value, and the plain one."""
    plain = [option.flag for option in options() if option.is_switch]
    return {form: flag for flag in plain for form in (flag, _negated(flag))}


def _negated(switch: str) -> str:
    return f"--no-{switch.removeprefix('--')}"


def _takes_no_value(switch: str) -> SettingsError:
    both = f"{switch} or {_negated(switch)}"
    return SettingsError(f"{switch} takes no value; write {both}, and nothing behind it.")


def _unknown(argument: str, argv: Sequence[str]) -> SettingsError:
    switches = _switches()
    if not argument.startswith("-"):
        for flag, behind in pairwise(argv):
            if behind == argument and flag in switches:
                return _takes_no_value(switches[flag])
        if argument == argv[0] and ":" not in argument:  # else it may be a worker's address
            return SettingsError(
                f"There is no command {argument!r}; there are ab, simulate, store, keys and compile, and without one "
                "the router serves the workers that --worker names."
            )
        return SettingsError(
            f"{argument!r} belongs to no flag; each worker needs its own --worker. (Commands come first: ab, simulate, "
            "store, keys, compile.)"
        )
    flag = argument.partition("=")[0]
    known = [CONFIG_FLAG, *(option.flag for option in options()), *switches]
    return SettingsError(f"There is no flag {flag}{_flag_hint(flag, known)}")


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    by_key = {option.key: option for option in options()}
    return {by_key[k].attribute: by_key[k].read(v, by_key[k].flag, text=True) for k, v in flags.items()}


def _from_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """An empty variable counts as not set."""
    known = {option.variable: option for option in options()}
    values = {}
    for name, text in environ.items():
        if not name.startswith(VARIABLE_PREFIX) or name == CONFIG_VARIABLE or not text or _is_kubernetes(name, text):
            continue
        if name in known:
            values[known[name].attribute] = known[name].read(text, name, text=True)
        else:
            _log.warning("The variable %s means nothing to the router%s", name, _hint(name, known, VARIABLE_PREFIX))
    return values


def _is_kubernetes(name: str, text: str) -> bool:
    """Kubernetes describes a service named `router` to every pod in variables that look like ours."""
    return name.startswith(_KUBERNETES_LINKS) or (name == "ROUTER_PORT" and text.startswith(("tcp://", "udp://")))


def _from_file(path: Path, place: str) -> dict[str, Any]:
    """`place`: where the file is named."""
    known = {option.key: option for option in options()}
    values = {}
    for key, value in _read_yaml(path, place).items():
        if key not in known:
            raise SettingsError(f"{path}: there is no setting {str(key)!r}{_hint(str(key), known)}")
        values[known[key].attribute] = known[key].read(value, f"{path}: {key}", text=False)
    return values


def _read_yaml(path: Path, place: str) -> dict[Any, Any]:
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"{place}: {path} cannot be read: {reason}.") from None
    except NotYaml as error:
        raise SettingsError(f"{path} is not valid YAML{error}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must hold keys and values such as `port: 8080`.")
    return content


def _flag_hint(flag: str, known: Sequence[str]) -> str:
    """Many a flag that there is not is another router's: what is only a little alike is not meant, and one that says
    more than ours (--worker-urls) is ours."""
    if flag in _THEIRS:
        return f"; did you mean {_THEIRS[flag]}?"
    shorter = [each for each in known if flag.startswith(f"{each}-")]
    return _hint(flag, known, "--", 0.75, f"; did you mean {max(shorter, key=len)}?" if shorter else _ELSEWHERE)


def _hint(name: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6, otherwise: str = _ALL) -> str:
    """`prefix`: all of `known` begin with it, and alike by that alone is not alike."""
    bare = [each.removeprefix(prefix) for each in known]
    near = difflib.get_close_matches(name.replace(prefix, ""), bare, 1, cutoff)
    return f"; did you mean {prefix}{near[0]}?" if near else otherwise


def version() -> str:
    """With the form that is installed: much of how it fares depends on it."""
    return version_of("kv-router") + (", compiled" if is_compiled() else "")


def is_compiled() -> bool:
    """Whether what every request passes runs compiled (docs/adr/0008-compiled-modules.md)."""
    spec = importlib.util.find_spec("router.proxy.exchange")
    return spec is not None and not str(spec.origin).endswith(".py")
