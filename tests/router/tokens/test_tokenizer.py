"""Ids equal those of the reference library, whichever library makes them, and folders are read as engines read them."""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.tokens import CannotTokenize, Tokenizer, load_tokenizer
from tests.examples import examples
from tests.router.tokens.conftest import CHATML, CONFIG, SPECIAL, write_model

pieces = st.sampled_from([*SPECIAL, "  ", "\n\n", "the", "fox", "🙂", "e\u0301", "日本", "42", "\x00"])
texts = st.lists(st.one_of(pieces, st.text(max_size=8)), max_size=12).map("".join)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts, special=st.booleans())
def test_ids_equal_the_reference(model_folder: Path, reference: tokenizers.Tokenizer, text: str, special: bool) -> None:
    assert load(model_folder).encode(text, special).tolist() == reference.encode(text, add_special_tokens=special).ids


@cache
def load(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def test_long_text_equals_the_reference(model_folder: Path, reference: tokenizers.Tokenizer) -> None:
    text = "".join(f"{n} the quick\tfox 🙂 jumps<|im_end|>\n" for n in range(3000))
    assert load(model_folder).encode(text, False).tolist() == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("library", ["fastokens", "tokenizers"])
def test_whether_tokens_end_with_a_whole_character(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, library: str
) -> None:
    if library == "tokenizers":
        monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer = load_tokenizer(model_folder)
    assert tokenizer.backend == library
    text = "naïve 🙂 fox"
    ids = tokenizer.encode(text, False).tolist()
    whole = [count for count in range(1, len(ids) + 1) if tokenizer.ends_whole(ids[:count])]
    encoded = {len(tokenizer.encode(text[:length], False)) for length in range(1, len(text) + 1)}
    assert set(whole) <= encoded  # beginnings of the text
    assert len(ids) in whole
    assert len(whole) < len(ids)  # which has characters of several tokens
    assert tokenizer.ends_whole(ids * 1000)


def test_repeated_segments_are_kept_within_bounds(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, reference: tokenizers.Tokenizer
) -> None:
    fastokens = pytest.importorskip("fastokens")
    made: list[Any] = []
    load_json = fastokens.Tokenizer.from_json_str

    def keep(text: str) -> Any:
        made.append(load_json(text))
        return made[0]

    monkeypatch.setattr(fastokens, "Tokenizer", SimpleNamespace(from_json_str=keep))
    monkeypatch.setattr("router.tokens.tokenizer.SEGMENT_CACHE", 2**16)
    encode = load_tokenizer(model_folder).encode
    segments = [f"{number} the quick fox" * 20 for number in range(400)]
    for text in ("<|im_start|>".join(segments[:number]) for number in range(0, 400, 40)):
        assert encode(text, False).tolist() == reference.encode(text, add_special_tokens=False).ids
        assert made[0].segment_cache_stats()["bytes"] <= 2**16
    assert made[0].segment_cache_stats()["hits"] > 0


def test_special_tokens_are_added_only_when_asked_for(model_folder: Path) -> None:
    tokenizer = load(model_folder)
    assert tokenizer.encode("the", True).tolist() == [0, *tokenizer.encode("the", False)]


def test_half_a_surrogate_pair_is_refused(model_folder: Path) -> None:
    with pytest.raises(CannotTokenize) as caught:
        load(model_folder).encode("a\ud800", False)
    assert caught.value.reason == "malformed"


def fake_fastokens(monkeypatch: pytest.MonkeyPatch, encode: Callable[[str, bool], list[int]]) -> None:
    class Fake:
        @staticmethod
        def from_json_str(text: str) -> Fake:
            return Fake()

        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            return array("I", encode(texts[0], add_special_tokens)).tobytes(), b""

        def enable_segment_cache(self, max_bytes: int) -> None: ...

    module = ModuleType("fastokens")
    module.Tokenizer = Fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastokens", module)


def refuse(text: str, special: bool) -> list[int]:
    raise Exception("unknown model")  # noqa: TRY002 - as the library does


@pytest.mark.parametrize("encode", [lambda text, special: [1], refuse], ids=["differs", "refuses"])
def test_a_library_that_differs_or_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model_folder: Path,
    reference: tokenizers.Tokenizer,
    encode: Callable[[str, bool], list[int]],
) -> None:
    caplog.set_level("INFO")
    fake_fastokens(monkeypatch, encode)
    tokenizer = load_tokenizer(model_folder)
    assert tokenizer.backend == "tokenizers"
    assert tokenizer.encode("the fox", True).tolist() == reference.encode("the fox").ids
    assert "fastokens" in caplog.text


@pytest.mark.parametrize(
    "differs",
    [
        lambda text, special, before: text.startswith("naïve"),
        lambda text, special, before: text == "<s><|im_start|><|im_end|>",
        lambda text, special, before: "<|im_start|> text " in text,
        lambda text, special, before: len(text) > 1000,
        lambda text, special, before: special,
        lambda text, special, before: not special,
        lambda text, special, before: before > 0,
    ],
    ids=["a text", "special tokens", "text between them", "long text", "special", "not special", "the second time"],
)
def test_a_library_that_differs_somewhere_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    model_folder: Path,
    reference: tokenizers.Tokenizer,
    differs: Callable[[str, bool, int], bool],
) -> None:
    asked: Counter[tuple[str, bool]] = Counter()

    def encode(text: str, special: bool) -> list[int]:
        before = asked[text, special]
        asked[text, special] += 1
        return [] if differs(text, special, before) else reference.encode(text, add_special_tokens=special).ids

    fake_fastokens(monkeypatch, encode)
    assert load_tokenizer(model_folder).backend == "tokenizers"


def test_the_fast_library_is_not_needed(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert load_tokenizer(model_folder).backend == "tokenizers"


def test_the_fast_library_is_used_where_it_agrees(model_folder: Path) -> None:
    pytest.importorskip("fastokens")
    assert load(model_folder).backend == "fastokens"


def test_stored_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.enable_truncation(4)
    model.enable_padding(length=8)
    model.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("the fox " * 10, False)) > 8
    assert len(tokenizer.encode("a", False)) == 1


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    decoder = {"400": {"content": "<tool>", "special": True, "lstrip": False}, "1": {"content": "<|im_start|>"}}
    plain = load_tokenizer(write_model(tmp_path / "a"))
    adding = load_tokenizer(write_model(tmp_path / "b", CONFIG | {"added_tokens_decoder": decoder}))
    assert len(plain.encode("<tool>", False)) > 1
    assert len(adding.encode("<tool>", False)) == 1


def test_tokens_that_the_config_names_are_as_it_says(tmp_path: Path, reference: tokenizers.Tokenizer) -> None:
    """As in `transformers`, even if tokenizer.json has them without these flags, or as any other part of words."""
    decoder = {
        "2": {"content": "<|im_end|>", "special": True, "lstrip": True, "rstrip": True},
        str(reference.token_to_id("fo")): {"content": "fo"},
    }
    tokenizer = load_tokenizer(write_model(tmp_path, CONFIG | {"added_tokens_decoder": decoder}))
    for text, parts in [("a <|im_end|> b", ["a", "<|im_end|>", "b"]), ("a fox", ["a", "Ġ", "fo", "x"])]:
        assert tokenizer.encode(text, False).tolist() == list(map(reference.token_to_id, parts))


@pytest.mark.parametrize(
    ("config", "vocabulary"),
    [
        (None, 1000),
        ({"vocab_size": 900}, 1000),
        ({"vocab_size": 2000}, 2000),
        ({"text_config": {"vocab_size": 2000}}, 2000),
    ],
    ids=str,
)
def test_every_id_that_the_model_knows_is_below_the_size_of_its_vocabulary(
    tmp_path: Path, config: dict[str, object] | None, vocabulary: int
) -> None:
    folder = write_model(tmp_path)
    model = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model["model"]["vocab"]["the last"] = 999  # no other has an id near it
    (folder / "tokenizer.json").write_text(json.dumps(model), "utf-8")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    assert load_tokenizer(folder).vocabulary == vocabulary


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"a": ' + "[" * 100_000,
        '{"added_tokens_decoder": {"0": "<s>"}}',
        '{"added_tokens_decoder": {"0": {}}}',
        '{"added_tokens_decoder": {"0": {"content": 5}}}',
        '{"added_tokens_decoder": {"first": {"content": "<s>"}}}',
        '{"chat_template": [{"name": "default"}]}',
        '{"chat_template": ["x"]}',
    ],
)
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (write_model(tmp_path) / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
        load_tokenizer(tmp_path)


def shown(folder: Path, *, with_tools: bool = False) -> str:
    templates = load_tokenizer(folder).templates
    assert templates is not None
    return templates.choose(with_tools=with_tools).render([{"role": "user", "content": "x"}])


def test_the_template_of_the_config(model_folder: Path) -> None:
    assert shown(model_folder) == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}file{{ pad_token }}{{ eos_token }}")
    assert shown(folder) == "<s>file<|im_end|>"


def test_named_templates_in_the_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write_model(tmp_path, CONFIG | {"chat_template": named})
    assert (shown(folder), shown(folder, with_tools=True)) == ("plain", "tools")


def test_named_template_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {})
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert (shown(folder), shown(folder, with_tools=True)) == ("plain", "tools")


def test_special_tokens_of_the_older_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {"chat_template": "{{ bos_token }}{{ eos_token }}", "eos_token": "E"})
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "B"}, "eos_token": "old"}')
    assert shown(folder) == "BE"


def test_no_template_is_told(tmp_path: Path) -> None:
    with pytest.raises(CannotTokenize) as caught:
        shown(write_model(tmp_path, {}))
    assert caught.value.reason == "no_template"


def test_a_model_that_engines_render_by_code_has_no_templates(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {"chat_template": CHATML})
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    assert load_tokenizer(folder).templates is None
