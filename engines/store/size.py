"""How large a token's KV is: what must be moved when it is not computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "fp8": 1, "float8": 1, "int8": 1}
_CACHED_BY_TOKEN = {"full_attention", "sliding_attention", "chunked_attention"}


def of_language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with what it says of the language model alone, where there is more than that, as for images."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def bytes_per_token(config: Mapping[str, Any], dtype: str | None = None) -> int | None:
    """Of all layers and ranks together, by a model's config.json; `dtype`: the engine's, where it is told. None: it
    does not say, or some layers keep no KV by token."""
    config = of_language_model(config)
    layers = _number(config, "num_hidden_layers")
    values = _values(config)
    width = _width(dtype) or _width(config.get("torch_dtype") or config.get("dtype"))
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and not all(kind in _CACHED_BY_TOKEN for kind in kinds if isinstance(kind, str)):
        return None
    return layers * values * width if layers and values and width else None


def _values(config: Mapping[str, Any]) -> int | None:
    """Numbers that one layer keeps of a token."""
    latent = _number(config, "kv_lora_rank")
    if latent is not None:  # MLA: one latent and the rotated part of the key
        rotated = _number(config, "qk_rope_head_dim")
        return None if rotated is None else latent + rotated
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads") or heads
    hidden = _number(config, "hidden_size")
    size = _number(config, "head_dim") or (hidden // heads if hidden and heads else None)
    return 2 * kv_heads * size if kv_heads and size else None


def _width(dtype: object) -> int | None:
    if not isinstance(dtype, str):
        return None
    name = dtype.removeprefix("torch.")
    return next((width for known, width in _BYTES.items() if name == known or name.startswith(f"{known}_")), None)


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and value > 0 else None
