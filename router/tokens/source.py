"""Where a model's tokenizer is: a stated folder, the folder an engine loaded from, or the Hugging Face cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from engines.description import Model, bases
from router.model_folder import holds, may_read
from router.settings import SettingsError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


def find_tokenizer(
    setting: str,
    models: Sequence[Model],
    tokenizer_path: str | None,
    environ: Mapping[str, str] = os.environ,
    within: Sequence[str] = (),
) -> Path | None:
    """The folder with tokenizer.json that `setting` (`--tokenizer`) leads to, or None when there is none to be found.

    `auto` reads only local disks; only a NAME may use the network. Raises SettingsError for a PATH or NAME that leads
    nowhere. `tokenizer_path` is what an engine says it loaded; it and the models' folders count only if they are in one
    of the folders `within`, where any are given.
    """
    if setting == "engine":
        return None
    if setting == "auto":
        return _find_local(_candidates(models, tokenizer_path), environ, within)
    path = _expanded(setting)
    if setting.startswith((".", "/", "~")) or os.path.exists(path):  # False where the name is none that a file can have
        return _stated_folder(path)
    return _find_local([setting], environ) or _download(setting)


def _candidates(models: Sequence[Model], tokenizer_path: str | None) -> Iterable[str]:
    """What the tokenizer was loaded from, then what the base models were; adapters come without one."""
    base = bases(models)
    names = [tokenizer_path, *(model.root for model in base), *(model.id for model in base)]
    return dict.fromkeys(name for name in names if name)


def _find_local(names: Iterable[str], environ: Mapping[str, str], within: Sequence[str] = ()) -> Path | None:
    for name in names:
        stated = Path(name) if may_read(name, within) else None
        for folder in (stated, _cached(name, environ)):
            if folder is not None and holds(folder, "tokenizer.json"):
                return folder
    return None


def _cached(name: str, environ: Mapping[str, str]) -> Path | None:
    """The snapshot of a model's main branch in the Hugging Face cache."""
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = _expanded(environ.get("HF_HUB_CACHE") or home / "hub")
    repository = cache / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return repository / "snapshots" / revision


def _expanded(path: str | Path) -> Path:
    """As it is where a user has no home, as in containers and services; `Path.expanduser` raises RuntimeError then."""
    return Path(os.path.expanduser(path))


def _stated_folder(path: Path) -> Path:
    folder = path.parent if path.name == "tokenizer.json" else path
    file = folder / "tokenizer.json"
    try:
        found = file.is_file()
    except OSError as error:  # any but that it is not there
        raise SettingsError(f"--tokenizer: {file} cannot be read: {error.strerror}.") from None
    if not found:
        raise SettingsError(f"--tokenizer: there is no {file}.")
    return folder


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, and only needed here

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # noqa: BLE001 - its errors have no common base
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SettingsError(f"--tokenizer: {name!r} is no folder and could not be fetched: {reason}") from None
    return _stated_folder(folder)
