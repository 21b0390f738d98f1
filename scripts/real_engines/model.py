"""Writes the tiny model's folder with the Python of an installed engine, which has `tokenizers`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from .install import CannotInstall
from .places import HERE, alone, engines_folder

MAKER = HERE / "tiny_model.py"


def make_model(folder: Path) -> None:
    for engine in ("vllm", "sglang"):
        venv = engines_folder() / engine
        if (venv / f".{engine}-installed").exists():
            subprocess.run([str(venv / "bin/python"), str(MAKER), str(folder)], check=True)
            return
    raise CannotInstall("making a model needs an engine's environment: run scripts/real-engines install vllm")


def kept_model() -> Path:
    """The one that is served, beside the environments; named by its maker's content, so that a change makes another."""
    digest = hashlib.sha256(MAKER.read_bytes()).hexdigest()[:12]
    with alone("model") as folder:
        model = folder / f"tiny-{digest}"
        if not model.exists():
            made = Path(tempfile.mkdtemp(dir=folder))
            make_model(made)
            shutil.move(made, model)
    return model
