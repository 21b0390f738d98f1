"""weights.py FOLDER: gives the tiny model in FOLDER random weights, the same on every run, in model.safetensors.

Under an engine's own dummy weights a greedy answer follows from the last token alone, so that it is right even when the
keys and values of all before are wrong. Under these the whole prompt decides. Run with the Python of an engine's
environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
from safetensors.torch import save_file  # type: ignore[import-not-found,unused-ignore]

SEED = 1
SHARP = 2.0
"""What reads out of attention and into the vocabulary is this much larger, or all answers look alike."""


class Weights:
    def __init__(self, config: dict[str, Any]) -> None:
        self._hidden = config["hidden_size"]
        self._mlp = config["intermediate_size"]
        self._head = config["head_dim"]
        self._queries = config["num_attention_heads"] * self._head
        self._keys = config["num_key_value_heads"] * self._head
        self._chance = torch.Generator().manual_seed(SEED)
        self.tensors: dict[str, Any] = {
            "model.embed_tokens.weight": self._normal(config["vocab_size"], self._hidden, self._hidden**0.5),
            "lm_head.weight": self._normal(config["vocab_size"], self._hidden, SHARP),
            "model.norm.weight": constant(self._hidden, 1.0),
        }
        for number in range(config["num_hidden_layers"]):
            layer = self._attention() | self._feed_forward()
            self.tensors |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in layer.items()}

    def _attention(self) -> dict[str, Any]:
        return {
            "input_layernorm": constant(self._hidden, 1.0),
            "self_attn.q_proj": self._normal(self._queries, self._hidden),
            "self_attn.k_proj": self._normal(self._keys, self._hidden),
            "self_attn.v_proj": self._normal(self._keys, self._hidden, SHARP),
            "self_attn.o_proj": self._normal(self._hidden, self._queries, SHARP),
            "self_attn.q_norm": constant(self._head, 1.5),
            "self_attn.k_norm": constant(self._head, 1.5),
        }

    def _feed_forward(self) -> dict[str, Any]:
        return {
            "post_attention_layernorm": constant(self._hidden, 1.0),
            "mlp.gate_proj": self._normal(self._mlp, self._hidden),
            "mlp.up_proj": self._normal(self._mlp, self._hidden),
            "mlp.down_proj": self._normal(self._hidden, self._mlp),
        }

    def _normal(self, out: int, into: int, scale: float = 1.0) -> Any:
        return (torch.randn(out, into, generator=self._chance) * scale / into**0.5).to(torch.bfloat16)


def constant(size: int, value: float) -> Any:
    return torch.full((size,), value, dtype=torch.bfloat16)


def main(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"tie_word_embeddings": False}
    path.write_text(json.dumps(config, indent=1))
    save_file(Weights(config).tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
