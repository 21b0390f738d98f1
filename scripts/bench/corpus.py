"""English to make prompts of: the docstrings of Python's standard library, and a tokenizer trained on them.

Nothing is downloaded, and the same Python gives the same text. The folder looks like a model's, without weights, so
that every router that wants a model can be given it.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .places import cache_folder

VOCABULARY = 8192
CONTEXT = 32768
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "encodings"}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": CONTEXT,
    "chat_template": _TEMPLATE,
}
_MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 2,
}


@cache
def sentences() -> list[str]:
    """About 15,000 lines of prose, in a fixed order."""
    path = cache_folder() / f"sentences-{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}.json"
    if not path.exists():
        path.write_text(json.dumps(list(dict.fromkeys(_read_library()))))
    found: list[str] = json.loads(path.read_text())
    return found


def _read_library() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not _SKIPPED.intersection(path.relative_to(library).parts):
            yield from _docstrings(path.read_text(encoding="utf-8", errors="replace"))


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # files that show mistakes on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for line in (ast.get_docstring(node) or "").splitlines():
                if len(line.strip()) > 20:
                    yield line.strip()


def model_folder() -> Path:
    """Made on first use."""
    folder = cache_folder() / f"model-{VOCABULARY}-{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=cache_folder()))
        _train().save(str(made / "tokenizer.json"))
        (made / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG, indent=1))
        (made / "config.json").write_text(json.dumps(_MODEL_CONFIG, indent=1))
        (made / "generation_config.json").write_text('{"eos_token_id": [2]}')
        shutil.move(made, folder)  # whole or not at all
    return folder


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sentences(), trainer)
    return tokenizer
