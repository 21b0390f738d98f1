"""Writes the tiny model's folder with the Python of an installed engine, which has `tokenizers` and `torch`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from .install import ENGINES, CannotInstall, is_installed
from .places import HERE, alone, engines_folder

MAKER = HERE / "tiny_model.py"
WEIGHTS_MAKER = HERE / "weights.py"


def make_model(folder: Path, *, weights: bool = False) -> None:
    for engine in filter(is_installed, ENGINES):
        for maker in _makers(weights=weights):
            subprocess.run([str(engines_folder() / engine / "bin/python"), str(maker), str(folder)], check=True)
        return
    raise CannotInstall("making a model needs an engine's environment: run scripts/real-engines install vllm")


def kept_model(*, weights: bool = False) -> Path:
    """One that is served, beside the environments; named by its makers' content, so that a change makes another."""
    digest = hashlib.sha256(b"".join(maker.read_bytes() for maker in _makers(weights=weights))).hexdigest()[:12]
    with alone("model") as folder:
        model = folder / f"tiny-{digest}"
        if not model.exists():
            made = Path(tempfile.mkdtemp(dir=folder))
            make_model(made, weights=weights)
            shutil.move(made, model)
    return model


def _makers(*, weights: bool) -> list[Path]:
    return [MAKER, WEIGHTS_MAKER] if weights else [MAKER]
