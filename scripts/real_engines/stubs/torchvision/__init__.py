"""Stands in for torchvision, which SGLang imports and text models never call: any submodule and name exists."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__version__ = "0.0.0"


class Anything:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("torchvision stub")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class InterpolationMode(Anything):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class StubModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - the import system reads it on the class

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return InterpolationMode
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        return type(name, (Anything,), {}) if name[:1].isupper() else Anything()


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(  # the import system fixes the arguments
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("torchvision."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(StubFinder())
