"""What is compiled (setup.py), and what compiled modules may not do."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

from router.http.front import Connection
from router.http.upstream import WorkerConnection

ROOT = Path(__file__).parents[2]


def compiled() -> list[Path]:
    """As setup.py names them."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    names = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED"
    )
    return [ROOT / str(name) for name in ast.literal_eval(names)]


@pytest.mark.parametrize("path", compiled(), ids=lambda path: path.name)
def test_a_compiled_module_has_no_kernel_of_numbas_and_no_struct_of_msgspecs(path: Path) -> None:
    """The former takes functions of Python, the latter the annotations of a class, which mypyc does not keep."""
    text = path.read_text()
    assert "indexer.jit" not in text
    assert "msgspec.Struct" not in text


@pytest.mark.parametrize("path", compiled(), ids=lambda path: path.name)
def test_a_compiled_module_calls_nothing_within_the_bounds_of_a_slice(path: Path) -> None:
    """mypyc 2.4.1 evaluates them twice, so whatever has an effect has it twice."""
    slices = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Slice)]
    calls = [node.func for each in slices for node in ast.walk(each) if isinstance(node, ast.Call)]
    assert {ast.unparse(each) for each in calls} <= {"len", "min", "max", "found.start", "found.end"}


def test_what_derives_from_a_compiled_class_is_compiled_too() -> None:
    importlib.import_module("router.app")  # and all that it takes
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in compiled()}
    children = [each for each in everybody(object) if any(base.__module__ in modules for base in each.__bases__)]
    assert {child.__module__ for child in children} <= modules
    assert children


BUILD = """
import runpy, sys
from setuptools import Extension, setup
extensions = [Extension("package.good", ["good.c"]), Extension("package.other", [sys.argv[2]])]
command = runpy.run_path(sys.argv[1])["AllOrNone"]
setup(name="package", ext_modules=extensions, cmdclass={"build_ext": command}, script_args=["build_ext"])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("other", "wanted", "status", "built"),
    [("other.c", "", 0, 2), ("bad.c", "", 0, 0), ("bad.c", "1", 1, None)],
    ids=["all", "none", "wanted"],
)
def test_where_one_module_cannot_be_compiled_none_is(
    tmp_path: Path, other: str, wanted: str, status: int, built: int | None
) -> None:
    """Those of mypyc take their code from one that they share, and cannot be imported without it."""
    for name in ("good", "other"):  # a file each: they are compiled at the same time
        (tmp_path / f"{name}.c").write_text(f"void *PyInit_{name}(void) {{ return 0; }}")
    (tmp_path / "bad.c").write_text("#error too large for this machine")
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(ROOT / "setup.py"), other]
    environ = os.environ | {"KV_ROUTER_COMPILE": wanted}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == status, done.stderr
    found = len([*tmp_path.glob("build/lib*/**/*.so")])
    assert found == built or built is None
    assert ("runs uncompiled" in done.stderr + done.stdout) == (built == 0)


def test_the_files_of_one_module_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that mypyc makes are one module's; one after the other, they take minutes."""
    compile_together = runpy.run_path(str(ROOT / "setup.py"))["_compile_together"]
    monkeypatch.setitem(compile_together.__globals__, "JOBS", 2)
    both = threading.Barrier(2)

    def compile_one(sources: list[str], folder: str, *, debug: bool) -> list[str]:
        both.wait(timeout=20)
        return [f"{folder}/{source}.{debug}" for source in sources]

    assert compile_together(compile_one, ["a", "b"], "made", debug=False) == ["made/a.False", "made/b.False"]


STALE = """
import runpy, sys
from setuptools import setup
command = runpy.run_path(sys.argv[1])["OfThisTree"]
setup(name="package", packages=["package"], cmdclass={"build": command}, script_args=sys.argv[2:])
"""


@pytest.mark.slow
def test_what_an_earlier_build_has_left_is_not_installed(tmp_path: Path) -> None:
    """Neither a module that is no more, nor one that was compiled once: Python would take that before the source."""
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__.py", "kept.py", "removed.py"):
        (package / name).write_text("")

    def build(*arguments: str) -> set[str]:
        command = [sys.executable, "-W", "ignore", "-c", STALE, str(ROOT / "setup.py"), "build", *arguments]
        subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=50, check=True)
        return {path.name for path in (tmp_path / "build" / "lib" / "package").iterdir()}

    assert build() == {"__init__.py", "kept.py", "removed.py"}
    (package / "removed.py").unlink()
    (tmp_path / "build" / "lib" / "package" / "kept.so").write_text("")
    assert build() == {"__init__.py", "kept.py"}
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "foreign").write_text("")
    build("--build-lib", "there")
    assert (tmp_path / "there" / "foreign").exists()


WHICH = """
import runpy, sys, types
from setuptools import Extension
mypyc = sys.modules["mypyc"] = types.ModuleType("mypyc")
mypyc.build = sys.modules["mypyc.build"] = types.ModuleType("mypyc.build")
mypyc.build.mypycify = lambda *_, **__: [Extension("compiled", [])]
print(*(each.name for each in runpy.run_path(sys.argv[0])["extensions"]()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "wanted", "compiled"),
    [
        (["bdist_wheel", "--dist-dir", "there"], "1", "compiled"),
        (["bdist_wheel"], "0", ""),
        (["egg_info"], "1", ""),
        (["dist_info", "--output-dir", "there", "--keep-egg-info"], "1", ""),
        (["sdist", "--formats", "gztar"], "1", ""),
        (["editable_wheel"], "1", ""),
    ],
    ids=["wheel", "not wanted", "needs", "metadata", "source", "editable"],
)
def test_only_what_is_installed_is_compiled(arguments: list[str], wanted: str, compiled: str) -> None:
    """pip asks twice for metadata before it builds; mypyc would take a minute for each answer."""
    code = f"import sys; sys.argv = sys.argv[1:]\n{WHICH}"
    command = [sys.executable, "-W", "ignore", "-c", code, str(ROOT / "setup.py"), *arguments]
    environ = os.environ | {"KV_ROUTER_COMPILE": wanted}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == compiled


WITHOUT = """
import runpy, sys
sys.argv, module = ["setup.py", "bdist_wheel"], runpy.run_path(sys.argv[1])
module["extensions"].__globals__["_can_compile"] = lambda: True
sys.modules["mypyc"] = None
print(module["extensions"]())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "status", "says"),
    [
        ("", 0, "warning: there is no mypy to build with, so the router runs uncompiled: "),
        ("1", 1, "KV_ROUTER_COMPILE=1 needs mypy to build with: "),
        ("false", 1, "KV_ROUTER_COMPILE takes 0 or 1, not 'false'."),
    ],
)
def test_without_mypy_to_build_with_the_router_is_not_compiled(wanted: str, status: int, says: str) -> None:
    """pip installs it to build with, but not with --no-build-isolation."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, str(ROOT / "setup.py")]
    environ = os.environ | {"KV_ROUTER_COMPILE": wanted}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (status, "" if status else "[]\n")
    assert done.stderr.startswith(says)


FINDS = "import runpy, sys; print(runpy.run_path(sys.argv[1])['_can_compile']())"


@pytest.mark.slow
def test_the_compiler_is_looked_for_where_setuptools_takes_it() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FINDS, str(ROOT / "setup.py")]

    def finds(compiler: str) -> bool:
        environ = os.environ | {"CC": compiler}
        return (
            "True"
            in subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50, check=True).stdout
        )

    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    assert finds(f"{sys.executable} -pipe") is headers  # it need be no compiler to be found
    assert not finds("/nowhere/cc")


def everybody(parent: type) -> set[type]:
    found, left = set[type](), [parent]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left.extend(type.__subclasses__(each))
    return found


@pytest.mark.parametrize("kind", [Connection, WorkerConnection])
def test_connections_are_what_an_event_loop_calls(kind: type) -> None:
    for name, _ in inspect.getmembers(asyncio.Protocol, callable):
        assert name.startswith("_") or callable(getattr(kind, name))
