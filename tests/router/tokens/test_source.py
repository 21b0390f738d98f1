"""Where a tokenizer is looked for, in which order, and that the network is used for a stated name alone."""

from __future__ import annotations

import errno
import os
import pwd
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engines.description import Model
from router.model_folder import MOST_BYTES
from router.settings import SettingsError
from router.tokens import find_tokenizer


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was fetched; fetching fails."""
    calls: list[tuple[str, Any]] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        calls.append((name, allow_patterns))
        raise OSError("offline\nand more")

    module = ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "tokenizer.json").write_text("{}")
    return path


def cached(hub: Path, name: str) -> Path:
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc\n")
    return folder(repository / "snapshots" / "abc")


def test_the_engine_setting_looks_nowhere(tmp_path: Path) -> None:
    assert find_tokenizer("engine", [Model("m", str(folder(tmp_path / "m")))], None, {}) is None


def test_a_stated_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    assert find_tokenizer(str(path), [], None, {}) == path
    assert find_tokenizer(str(path / "tokenizer.json"), [], None, {}) == path


@pytest.mark.parametrize("setting", ["/nowhere/at/all", "./nowhere"])
def test_a_stated_folder_without_a_tokenizer_is_an_error(setting: str, no_network: list[object]) -> None:
    with pytest.raises(SettingsError, match=r"--tokenizer: there is no .*tokenizer\.json"):
        find_tokenizer(setting, [], None, {})
    assert no_network == []


def test_auto_takes_what_the_engine_says_then_the_models_folder(tmp_path: Path) -> None:
    own, root = folder(tmp_path / "own"), folder(tmp_path / "root")
    models = [Model("m", str(root))]
    assert find_tokenizer("auto", models, str(own), {}) == own
    assert find_tokenizer("auto", models, "/not/here", {}) == root


def test_auto_passes_over_adapters(tmp_path: Path) -> None:
    models = [Model("adapter", str(folder(tmp_path / "adapter")), parent="m"), Model("m", str(folder(tmp_path / "m")))]
    assert find_tokenizer("auto", models, None, {}) == tmp_path / "m"


@pytest.mark.parametrize(
    ("environ", "hub"),
    [
        ({"HF_HUB_CACHE": "{}/a", "HF_HOME": "{}/b"}, "a"),
        ({"HF_HOME": "{}/b"}, "b/hub"),
        ({"XDG_CACHE_HOME": "{}/c"}, "c/huggingface/hub"),
    ],
)
def test_auto_finds_a_name_in_the_cache(tmp_path: Path, environ: dict[str, str], hub: str) -> None:
    snapshot = cached(tmp_path / hub, "org/model")
    environ = {key: value.format(tmp_path) for key, value in environ.items()}
    assert find_tokenizer("auto", [Model("served", "org/model")], None, environ) == snapshot
    assert find_tokenizer("auto", [Model("org/model")], None, environ) == snapshot
    assert find_tokenizer("org/model", [], None, environ) == snapshot


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("/" + "a" * 300, r"/a+/tokenizer.json cannot be read: File name too long\."),
        ("a" * 300, r"'a+' is no folder and could not be fetched: "),
    ],
)
def test_what_no_file_can_be_named_is_told(setting: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"^--tokenizer: {complaint}"):
        find_tokenizer(setting, [], None, {"HF_HOME": str(tmp_path)})


def test_a_folder_that_may_not_be_looked_into_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As engines' models may be for a router that runs as another user."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(
        SettingsError, match=r"^--tokenizer: /models/tokenizer.json cannot be read: Permission denied\.$"
    ):
        find_tokenizer("/models", [], None, {})


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with a number and no name, in a container or a service."""

    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert find_tokenizer("auto", [Model("org/model")], None, {}) is None
    with pytest.raises(SettingsError, match=r"^--tokenizer: there is no ~/model/tokenizer.json\.$"):
        find_tokenizer("~/model", [], None, {})


def test_auto_never_fetches(tmp_path: Path, no_network: list[object]) -> None:
    assert find_tokenizer("auto", [Model("m", "org/model")], "org/other", {"HF_HOME": str(tmp_path)}) is None
    assert no_network == []


def test_auto_takes_no_folder_beside_the_router_that_happens_to_have_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert find_tokenizer("auto", [Model("m", "org/model")], None, {"HF_HOME": str(tmp_path)}) is None


def test_a_stated_name_is_fetched_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "fetched")
    patterns: list[str] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return str(path)

    monkeypatch.setattr(sys.modules["huggingface_hub"], "snapshot_download", snapshot_download)
    assert find_tokenizer("org/model", [], None, {"HF_HOME": str(tmp_path)}) == path
    assert "tokenizer.json" in patterns
    assert not any("safetensors" in pattern or pattern == "*" for pattern in patterns)


def test_a_name_that_cannot_be_fetched_is_one_sentence(tmp_path: Path, no_network: list[object]) -> None:
    with pytest.raises(SettingsError) as caught:
        find_tokenizer("org/model", [], None, {"HF_HOME": str(tmp_path)})
    assert str(caught.value) == "--tokenizer: 'org/model' is no folder and could not be fetched: offline"
    assert len(no_network) == 1


def test_where_folders_are_stated_an_engine_may_name_no_others(tmp_path: Path) -> None:
    allowed, other = folder(tmp_path / "models" / "m"), folder(tmp_path / "home" / "m")
    within = [str(tmp_path / "models")]
    linked = tmp_path / "models" / "link"
    linked.symlink_to(other)
    around = str(tmp_path / "models" / ".." / "home" / "m")
    assert find_tokenizer("auto", [], str(allowed), {}, within) == allowed
    for named in (str(other), str(linked), around, "/", str(tmp_path / "models" / "none"), "a\0b"):
        assert find_tokenizer("auto", [Model("m", named)], named, {}, within) is None
    assert find_tokenizer("auto", [], str(other), {}) == other
    assert find_tokenizer("auto", [], "a\0b", {}) is None


def test_only_a_plain_file_of_a_size_that_can_be_is_read(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    for path in (pipe, large):
        path.mkdir()
    os.mkfifo(pipe / "tokenizer.json")
    with (large / "tokenizer.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # sparse
    assert find_tokenizer("auto", [], str(pipe), {}) is None
    assert find_tokenizer("auto", [], str(large), {}) is None
