"""Decorators that compile inner loops with numba (docs/adr/0004-compiled-kernels.md).

Compiled kernels are cached on disk, and compiled again when their file changes. Numba does not look at other files, so
the functions and constants that a kernel uses belong into the same file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

njit: Any = numba.njit  # not all of its options are known to its types
_F = TypeVar("_F", bound=Callable[..., Any])
_not_kept: list[str] = []
"""Kernels for which numba finds no folder that it may write to."""


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
    except RuntimeError:  # see `_not_kept`: compile at every start
        _not_kept.append(function.__qualname__)
        return cast("_F", njit(**options)(function))
    cache = getattr(compiled, "_cache", None)  # NUMBA_DISABLE_JIT leaves the function as it is
    if cache:
        cache.load_overload = _if_it_is_whole(cache.load_overload, cache.flush)
        cache.save_overload = _if_there_is_room(cache.save_overload)
    return cast("_F", compiled)


def _if_it_is_whole(load: Callable[..., object], flush: Callable[[], None]) -> Callable[..., object]:
    """Numba raises what it cannot read, such as files that a power failure has left empty: they are made anew. Reading
    a damaged pickle may raise anything."""

    def load_or_compile(*args: object) -> object:
        try:
            return load(*args)
        except Exception:  # noqa: BLE001 -- see above
            with contextlib.suppress(OSError):
                flush()  # else nothing could be added to the damaged index
            return None

    return load_or_compile


def _if_there_is_room(save: Callable[..., None]) -> Callable[..., None]:
    """On a full disk numba would raise what it could not save, though the kernel is compiled by then."""

    def save_or_not(*args: object) -> None:
        with contextlib.suppress(OSError):
            save(*args)

    return save_or_not
