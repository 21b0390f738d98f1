"""Stands in for SGLang's compiled sgl_kernel: only what a dense Llama or Qwen needs on `--device cpu` with
`--attention-backend torch_native`. Anything else raises when it is called."""

from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, _pool_len: Any = None
) -> None:
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[offset : offset + count].to(req_to_token.dtype)
        offset += count


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel stub: {name} is not available on this CPU")

    missing.__name__ = name
    return missing
