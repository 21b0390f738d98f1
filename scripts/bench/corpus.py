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

from scripts.real_engines import tiny_model

from .places import cache_folder

VOCABULARY = 8192
CONTEXT = 32768
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "encodings"}


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
        tiny_model.write(made, tiny_model.train(sentences(), VOCABULARY), {"max_position_embeddings": CONTEXT})
        (made / "generation_config.json").write_text('{"eos_token_id": [2]}')
        shutil.move(made, folder)  # whole or not at all
    return folder
