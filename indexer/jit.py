"""Decorators that compile inner loops with numba (docs/adr/0004-compiled-kernels.md).

Compiled kernels are cached on disk, and compiled again when their file changes. Numba does not look at other files, so
the functions and constants that a kernel uses belong into the same file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
from numba.core import caching

njit: Any = numba.njit  # not all of its options are known to its types
_caching: Any = caching  # nor is how it keeps things: only parts of that are public
_F = TypeVar("_F", bound=Callable[..., Any])
_not_kept: list[str] = []
"""Kernels that the next process will not find: there is no folder to write to, and nobody else has kept them, or no
room."""


def all_kept() -> bool:
    """Whether what is compiled here is on disk for the next process; else each compiles for itself."""
    return not _not_kept


def kernel(function: _F) -> _F:
    """Compile `function`, and cache the result on disk if there is a writable folder."""
    return _compiled(function)


def loop(function: _F) -> _F:
    """Compile a kernel that makes no arrays, without reference counting.

    Numba's counts are atomic, and would take as long as everything else that is done for a block.
    """
    return _compiled(function, _nrt=False)


def inlined(function: _F) -> _F:
    """Compile a part of kernels that is inlined where it is called."""
    return cast("_F", njit(function, inline="always"))


def _compiled(function: _F, **options: bool) -> _F:
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder can be written to
        compiled = njit(**options)(function)
    cache = getattr(compiled, "_cache", None)  # NUMBA_DISABLE_JIT leaves the function as it is
    if cache:
        others = _kept_by_others(function, cache.cache_path)
        if not cache.cache_path and not others:
            _not_kept.append(function.__qualname__)
        cache.load_overload = _first_found([cache, *others])
        cache.save_overload = _if_there_is_room(cache, function.__qualname__)
    return cast("_F", compiled)


def _found_if_read_only(locator: Any) -> Any:
    """As numba's `locator`, which passes over a folder that this user may not write to."""

    class Found(locator):  # type: ignore[misc]
        def ensure_cache_path(self) -> None:
            os.stat(self.get_cache_path())

    return Found


class _Folder(_caching.CompileResultCacheImpl):  # type: ignore[misc]
    """NUMBA_CACHE_DIR, or the folder next to the package."""

    _locator_classes = tuple(map(_found_if_read_only, _caching.CacheImpl._locator_classes[:2]))  # noqa: SLF001


class _CacheToRead(_caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _Folder

    def is_empty(self) -> bool:
        return not self._cache_file._load_index()  # noqa: SLF001


def _kept_by_others(function: Callable[..., Any], own_path: str | None) -> list[Any]:
    """What whoever installed the package, or made the image, has compiled for users who may not write there."""
    with contextlib.suppress(Exception):  # no folder, or what is in it is damaged
        cache = _CacheToRead(function)
        if cache.cache_path != own_path and not cache.is_empty():
            return [cache]
    return []


def _first_found(caches: Sequence[Any]) -> Callable[..., object]:
    loads = [_if_it_is_whole(cache.load_overload, cache.flush) for cache in caches]

    def load_or_compile(*args: object) -> object:
        return next(filter(None, (load(*args) for load in loads)), None)

    return load_or_compile


def _if_it_is_whole(load: Callable[..., object], flush: Callable[[], None]) -> Callable[..., object]:
    """Numba raises what it cannot read, such as files that a power failure has left empty: they are made anew. Reading
    a damaged pickle may raise anything."""

    def load_or_not(*args: object) -> object:
        try:
            return load(*args)
        except Exception:  # noqa: BLE001 -- see above
            with contextlib.suppress(OSError):
                flush()  # else nothing could be added to the damaged index
            return None

    return load_or_not


def _if_there_is_room(cache: Any, name: str) -> Callable[..., None]:
    """On a full disk numba would raise what it could not save, though the kernel is compiled by then."""
    save = cache.save_overload

    def save_or_not(*args: object) -> None:
        with contextlib.suppress(OSError):
            save(*args)
            if cache.cache_path:
                return
        _not_kept.append(name)

    return save_or_not
