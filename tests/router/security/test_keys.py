"""The file of keys, and the command that makes one."""

from __future__ import annotations

import hashlib
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import yaml

from publishers.streams import open_standard_streams
from router.__main__ import main
from router.security.keys import Key, Keys, read_keys
from tests.fakes.full_stream import FullStream

A, B = "a" * 64, "b" * 64


def entry(name: str = "one", sha256: str | list[str] = A) -> Key:
    return Key(name, sha256)


def test_a_new_key_is_shown_once_and_its_entry_is_what_the_file_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "team-a", "--admin"]) == 0
    out, err = capsys.readouterr()
    key = out.removesuffix("\n")
    assert key.startswith("kvr-")
    assert len(key) >= 47  # 32 bytes in base64
    assert key not in err
    file = tmp_path / "keys.yaml"
    file.write_text(err)
    found = read_keys(str(file)).find(key.encode())
    assert found
    assert (found.name, found.admin) == ("team-a", True)


def test_a_key_that_nobody_has_gets_no_entry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", FullStream())
    assert main(["keys", "new", "team-a"]) == 1
    sys.stdout.close()
    assert capsys.readouterr().err == "kv-router keys: No space left on device\n"


def test_no_key_is_made_where_standard_output_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    open_standard_streams()
    with closing(sys.stdout):
        assert main(["keys", "new", "team-a"]) == 1
    sys.stdout.close()
    said = "kv-router keys: standard output is closed, where the key would be shown, once: none was made\n"
    assert capsys.readouterr().err == said


def test_no_two_keys_are_alike(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        main(["keys", "new", "x"])
    keys = capsys.readouterr().out.split()
    assert len(set(keys)) == 3


@pytest.mark.parametrize("name", ["", "two words", "-x", "a/b", "x" * 65, "a\nadmin: true"])
def test_a_name_that_cannot_be_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--", name]) == 2
    assert capsys.readouterr().out == ""


def test_only_the_whole_key_finds_its_entry() -> None:
    one = entry(sha256=hashlib.sha256(b"secret").hexdigest())
    keys = Keys([one])
    assert keys.find(b"secret") is one
    for wrong in (b"", b"secre", b"secret ", b"Secret", one.digests[0].encode(), bytes.fromhex(one.digests[0])):
        assert keys.find(wrong) is None


def test_while_one_key_takes_anothers_place_both_are_valid() -> None:
    digests = [hashlib.sha256(key).hexdigest() for key in (b"old", b"new")]
    keys = Keys([entry(sha256=digests)])
    assert keys.find(b"old") is keys.find(b"new") is not None


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([entry("one", A), entry("one", B)], "the same name"),
        ([entry("one", A), entry("two", [B, A])], "one and two have the same key"),
    ],
)
def test_entries_that_cannot_stand_together(entries: list[Key], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Keys(entries)


GOOD = {"name": "one", "sha256": A}


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        "kvr-SECRET",
        GOOD,
        ["kvr-SECRET"],
        [{"name": "one"}],
        [GOOD | {"sha256": "kvr-SECRET"}],
        [GOOD | {"sha256": []}],
        [GOOD | {"sha256": GOOD["sha256"] + "\n"}],  # as `sha256: |` reads it: no key would match
        [GOOD | {"name": "two words"}],
        [GOOD | {"admin": "yes please"}],
        [GOOD | {"requests_per_minute": 0}],
        [GOOD | {"requests_per_minute": 1e-310}],
        [GOOD | {"concurrency": 0}],
        [GOOD | {"concurrency": 1.5}],
        [GOOD | {"models": "m"}],
        [GOOD | {"key": "kvr-SECRET"}],
        [{"kvr-SECRET": "one"}],
        [GOOD | {"kvr-SECRET\n": 1}],
        [GOOD, GOOD],
    ],
)
def test_a_file_that_cannot_be_used_is_told_and_not_quoted(tmp_path: Path, content: object) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump(content))
    if content == []:
        assert read_keys(str(file)).by_name == {}  # nobody may come in, which may be meant
        return
    with pytest.raises(ValueError, match="--api-keys: ") as caught:
        read_keys(str(file))
    assert str(file) in str(caught.value)
    assert "SECRET" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_field_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([GOOD | {"request_per_minute": 1}]))
    with pytest.raises(ValueError, match="unknown field `request_per_minute`"):
        read_keys(str(file))


@pytest.mark.parametrize(
    "text",
    ["- name: !!int SECRET", "- name: !!bool SECRET", "- name: !!timestamp SECRET", "[" * 1000, "- name: a\n  name: b"],
)
def test_what_yaml_has_no_value_for_is_told_without_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"keys\.yaml is not valid YAML(, line \d+)?\.$"):
        read_keys(str(file))


def test_a_file_that_is_no_yaml_or_not_there(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text('- name: "SECRET\n- x')
    with pytest.raises(ValueError, match=r"is not valid YAML, line \d+\.$"):
        read_keys(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not a text file"):
        read_keys(str(file))
    with pytest.raises(ValueError, match=r"--api-keys: .* cannot be read: No such file"):
        read_keys(str(tmp_path / "nowhere"))


def test_the_entries_of_a_file_are_looked_at_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens while msgspec looks at any: of 50,000, SIGHUP held up every stream for 0.1 s."""
    looked_at: list[object] = []

    def convert(told: object, kind: type[Key]) -> Key:
        looked_at.append(told)
        return whole(told, kind)

    whole = msgspec.convert
    monkeypatch.setattr(msgspec, "convert", convert)
    file = tmp_path / "keys.yaml"
    file.write_text("".join(f"- {{name: tenant-{number}, sha256: '{number:064x}'}}\n" for number in range(3)))
    assert list(read_keys(str(file)).by_name) == ["tenant-0", "tenant-1", "tenant-2"]
    assert [isinstance(told, dict) for told in looked_at] == [True] * 3


def test_what_an_entry_may_say(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    limits = {"requests_per_minute": 0.5, "concurrency": 2, "models": ["m", "n"], "admin": True}
    file.write_text(yaml.safe_dump([GOOD | limits]))
    found = read_keys(str(file)).by_name["one"]
    assert found == msgspec.convert(GOOD | limits, Key)
    assert (found.requests_per_minute, found.concurrency, found.models) == (0.5, 2, frozenset("mn"))
