"""Text to tokens and back, with and without a tokenizer file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engines.sim.tokens import (
    ANSWER_TOKENS,
    WORDS,
    ByteTokenizer,
    Message,
    Tokenizer,
    load_tokenizer,
    make_answers,
    text_of,
)

CHAT: list[Message] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny byte-level BPE with a chat template, trained on the answers' words."""
    made = tmp_path_factory.mktemp("tokenizer")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([WORDS], trainer)
    bpe.save(str(made / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    config = {"eos_token": "!", "chat_template": template + "{% if add_generation_prompt %}[go]{% endif %}"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(params=["bytes", "file"])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    return load_tokenizer(None if request.param == "bytes" else str(folder))


def test_bytes() -> None:
    assert ByteTokenizer().encode("aé", add_special_tokens=True) == [100, 198, 172]
    assert ByteTokenizer().piece(100) == "a"


def test_chats() -> None:
    text = ByteTokenizer().render(CHAT, True, {})
    assert text == "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ByteTokenizer().render(CHAT, False, {}) + "<|im_start|>assistant\n" == text


def test_a_files_chat_template_is_used(folder: Path) -> None:
    assert load_tokenizer(str(folder)).render(CHAT, True, {}) == "[system]be short![user]hi![go]"
    assert load_tokenizer(str(folder / "tokenizer.json")).render(CHAT, False, {}) == "[system]be short![user]hi!"


def test_a_template_that_fails_is_a_value_error(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    broken = folder / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config["chat_template"] = "{{ messages.nothing.here }}"
    (broken / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="template"):
        load_tokenizer(str(broken)).render(CHAT, True, {})


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), (None, ""), ([{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}], "a\nb")],
)
def test_content(content: object, text: str) -> None:
    assert text_of({"role": "user", "content": content}) == text


def test_answers_survive_decoding_and_encoding(tokenizer: Tokenizer) -> None:
    answers = make_answers(tokenizer, seed=1)
    assert len(answers.tokens) == len(answers.pieces) >= ANSWER_TOKENS
    assert tokenizer.encode(answers.text(0, 500), add_special_tokens=False) == answers.tokens[:500]
    assert [json.loads(piece) for piece in answers.json_pieces] == answers.pieces


def test_answers_go_round_and_depend_on_the_seed(tokenizer: Tokenizer) -> None:
    answers = make_answers(tokenizer, seed=1)
    length = len(answers.tokens)
    assert answers.text(length - 1, 2) == answers.pieces[-1] + answers.pieces[0]
    assert answers == make_answers(tokenizer, seed=1)
    assert answers.tokens != make_answers(tokenizer, seed=2).tokens
