"""A tiny model's folder: byte-level BPE trained on a few lines, and a ChatML-like template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps, the fox jumps again.",
    "A router sends each request to the worker that already holds most of its prefix.",
    "def route(request): return min(workers, key=cost)  # lower is better, 0123456789",
]
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_FIRST = (
    "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('Not first.') }}{% endfor %}" + CHATML
)
"""As Qwen's are."""
CONFIG = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "pad_token": None, "chat_template": CHATML}


def write_model(folder: Path, config: Mapping[str, object] = CONFIG) -> Path:
    """`<s>` is put in front of every text that is encoded with special tokens."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=SPECIAL, initial_alphabet=alphabet
    )
    model.train_from_iterator(TEXTS, trainer)
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> tokenizers.Tokenizer:
    """What the ids must equal."""
    return tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
