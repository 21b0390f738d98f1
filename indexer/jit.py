"""Compiles the index's inner loops (docs/adr/0004-compiled-kernels.md).

What is compiled is kept on disk and compiled again when the file changes that it is in. Numba does not look at other
files: a kernel's parts and constants belong into its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

njit: Any = numba.njit  # not all of its options are known to its types
_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """`function` compiled for arrays of fixed types, and kept on disk for the next start where there is a place to."""
    return _compiled(function)


def loop(function: _F) -> _F:
    """A kernel that makes no arrays: it only borrows those it is given, so no references are counted.

    Counting is atomic, and takes as long as all else that is done for a block.
    """
    return _compiled(function, _nrt=False)


def inlined(function: _F) -> _F:
    """A part of kernels, put where it is called."""
    return cast("_F", njit(function, inline="always"))


def _compiled(function: _F, **options: bool) -> _F:
    try:
        return cast("_F", njit(cache=True, **options)(function))
    except RuntimeError:  # numba finds no folder that it may write to: compile at every start
        return cast("_F", njit(**options)(function))
