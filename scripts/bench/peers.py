"""The peers: which versions, and how they come into an environment of their own."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from .places import cache_folder
from .processes import python_of


class Peer(NamedTuple):
    """`bare`: installed without what it depends on; then `packages` name what of that is needed."""

    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    note: str = ""


PEERS = {
    "vllm-router": Peer(("vllm-router==0.1.17",)),
    "sglang-router": Peer(("sglang-router==0.3.2",)),
    "ai-dynamo": Peer(
        (
            "ai-dynamo-runtime==1.6.1",
            "kubernetes>=32.0.1,<33",
            "msgspec>=0.19",
            "packaging",
            "prometheus-client>=0.23.1,<1",
            "pyyaml",
            "pyzmq>=26",
            "redis>=6.2,<9",
            "tqdm>=4",
            "transformers>=4.56",
            "zstandard>=0.23,<1",
        ),
        bare=("ai-dynamo==1.6.1",),
        note="without its dependency aisimulate, whose wheel is on no public index; front end and mocker run without",
    ),
}


def venv_of(peer: str) -> Path:
    return cache_folder() / "peers" / peer


def install(peer: str) -> str:
    """Once; returns why it cannot be had, "" when it is there."""
    venv, wanted = venv_of(peer), _recipe(PEERS[peer])
    stamp = venv / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    print(f"Installing {peer} into {venv} ...", file=sys.stderr, flush=True)
    try:
        _fill(venv, PEERS[peer])
    except subprocess.CalledProcessError as error:
        shutil.rmtree(venv, ignore_errors=True)
        return f"cannot be installed: {_reason(error.output or '')}"
    stamp.write_text(wanted)
    return ""


def _fill(venv: Path, peer: Peer) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    pip = [python_of(venv), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for arguments in (list(peer.packages), ["--no-deps", *peer.bare] if peer.bare else []):
        if arguments:
            subprocess.run([*pip, *arguments], check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _reason(output: str) -> str:
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    return (errors or output.splitlines() or ["pip failed"])[-1].strip()[:300]


def _recipe(peer: Peer) -> str:
    return hashlib.sha256(json.dumps([sys.version, *peer]).encode()).hexdigest()
