"""Compiles the index's inner loops (docs/adr/0004-compiled-kernels.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(function: _F) -> _F:
    """`function` compiled for arrays of fixed types, and kept on disk for the next start where there is a place to."""
    try:
        compiled = numba.njit(cache=True)(function)
    except RuntimeError:  # numba finds no folder that it may write to: compile at every start
        compiled = numba.njit(function)
    return cast("_F", compiled)


def inlined(function: _F) -> _F:
    """A part of kernels: put where it is called, since handing arrays over counts their references up and down."""
    return cast("_F", numba.njit(function, inline="always"))
