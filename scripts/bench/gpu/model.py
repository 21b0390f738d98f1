"""A model of a known size that nobody has to download: its configuration and a tokenizer. The engine makes up the
weights; how long a step takes does not depend on them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from scripts.real_engines import tiny_model

VOCABULARY = 32_768
"""`python -m router ab` asks with token ids below 30,000."""
LONGEST = 65_536
"""Tokens of a request."""


class Shape(NamedTuple):
    """As in a Hugging Face configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    head_dim: int = 128

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of every layer, in bfloat16."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * 2


SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16),
    "qwen3-4b": Shape(2560, 9728, 36, 32),
    "qwen3-8b": Shape(4096, 12288, 36, 32),
}
"""From the models' own config.json."""


def make_model(folder: Path, shape: Shape) -> None:
    tokenizer = tiny_model.train(tiny_model.corpus(lines_of_source=10_000), VOCABULARY)
    tiny_model.write(folder, tokenizer, {**shape._asdict(), "max_position_embeddings": LONGEST})
