"""tiny_model.py FOLDER: a two-layer Qwen3 without weights (for dummy weights) and a byte-level BPE tokenizer.

The tokenizer is trained on the text of Python's own standard library, so nothing is downloaded, and it is the same on
every run with the same Python. Run with the Python of an engine's environment."""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
LINES_OF_SOURCE = 200
MODULES = (
    *("abc", "argparse", "ast", "asyncio/base_events", "asyncio/events", "asyncio/tasks", "base64", "bisect"),
    *("calendar", "cmd", "code", "collections/__init__", "configparser", "contextlib", "copy", "csv"),
    *("dataclasses", "datetime", "decimal", "difflib", "doctest", "email/message", "enum", "fractions"),
    *("functools", "getopt", "gettext", "glob", "heapq", "hmac", "html/parser", "http/client", "http/cookiejar"),
    *("http/server", "imaplib", "inspect", "ipaddress", "json/__init__", "json/decoder", "locale"),
    *("logging/__init__", "mailbox", "multiprocessing/managers", "multiprocessing/pool", "optparse", "os"),
    *("pathlib", "pdb", "pickle", "pickletools", "platform", "plistlib", "pprint", "pydoc", "queue", "random"),
    *("sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "statistics"),
    *("string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tkinter/__init__"),
    *("trace", "traceback", "turtle", "typing", "unittest/case", "unittest/mock", "urllib/parse"),
    *("urllib/request", "uuid", "warnings", "weakref", "webbrowser", "xml/etree/ElementTree", "zipfile"),
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "chat_template": CHAT_TEMPLATE,
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def corpus(lines_of_source: int = LINES_OF_SOURCE) -> Iterator[str]:
    """`lines_of_source`: of each module, beside its docstrings; a larger vocabulary needs more."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in sorted(MODULES):
        path = library / f"{module}.py"
        if path.exists():
            yield from lines_of(path.read_text(encoding="utf-8", errors="replace"), lines_of_source)


def lines_of(source: str, at_most: int) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (ast.get_docstring(node) or "").splitlines()
    yield from source.splitlines()[:at_most]


def train(text: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, sizes: Mapping[str, int]) -> None:
    """`sizes`: of the configuration, where they are not the tiny model's."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {**CONFIG, "vocab_size": tokenizer.get_vocab_size(), **sizes}
    told = TOKENIZER | {"model_max_length": config["max_position_embeddings"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]), train(corpus()), {})
