"""YAML that people wrote, also where it is long."""

from __future__ import annotations

import gc

import pytest
import yaml

from router.yaml_text import NotYaml, _FastLoader, _Loader, read_yaml

LONG = "".join(f"- name: tenant-{number}\n  models: [a, b]\n" for number in range(2_000))
TEXTS = (
    "a: 1\nb: [x, 2.5, null, 'q']\nc: {d: 2001-01-01}",
    "&a [1, *a]",
    "- !!set {a}",
    "é: \U0001f600",
    "",
    "a: |\n  x\n  y\n",
    "a: 0x1f\nb: 1_000\nc: 012\nd: yes\ne: 1:30",
)


@pytest.mark.parametrize("collects", [True, False])
def test_nobody_looks_for_garbage_while_a_long_text_is_read(collects: bool) -> None:
    """A file of 50,000 keys took three times as long, and held everybody up for it."""
    looks: list[str] = []

    def look(phase: str, _: dict[str, int]) -> None:
        looks.append(phase)

    if not collects:
        gc.disable()
    gc.callbacks.append(look)
    try:
        assert len(read_yaml(LONG)) == 2_000
        assert len(looks) <= 4  # one look before, and one since
        assert gc.isenabled() is collects
    finally:
        gc.callbacks.remove(look)
        gc.enable()


def test_it_is_read_by_compiled_code() -> None:
    assert issubclass(_FastLoader, yaml.CSafeLoader)


@pytest.mark.parametrize("text", TEXTS)
def test_both_readings_are_the_same(text: str) -> None:
    fast, slow = (repr(yaml.load(text, loader)) for loader in (_FastLoader, _Loader))
    assert fast == slow == repr(read_yaml(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\na: 2", ", line 2: 'a' is given twice"),
        ("? [a]\n: 1", ", line 1: a key is no text"),
        ("[", ", line 1: expected the node content, but found '<stream end>'"),
        ("a: !!python/name:os.system", ", line 1: could not determine a constructor"),
        ("[" * 100_000, ""),
        ("\ud800", ""),
        ("a: \x00", ""),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(text: str, why: str) -> None:
    with pytest.raises(NotYaml) as raised:
        read_yaml(text)
    assert str(raised.value).startswith(why)
    assert gc.isenabled()
