"""How long one engine step takes: a sum of five terms, each with a physical reason.

The defaults describe Llama-3.1-8B (8.03 billion parameters; 32 layers, 32 query and 8 KV heads of 128) in bf16 on one
H100 SXM (data sheet: 3.35 TB/s, 989 TFLOP/s dense). Weights take 16 GB and 262,144 tokens of KV 34 GB of its 80 GB.
They are estimates from those numbers, not measurements; every one is a flag. Terms are added, although a real step
overlaps compute and memory traffic: an upper bound that keeps each term visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

HELP: Final = {
    "base_s": "timing: seconds of every step",
    "prefill_tokens_per_s": "timing: tokens prefilled per second, without attention",
    "attention_s_per_pair": "timing: seconds for each pair of a prefilled token and one that it attends to",
    "decode_s_per_sequence": "timing: seconds for each decoding sequence in a step",
    "kv_read_s_per_token": "timing: seconds for each token of context that a decoding sequence reads",
}
"""What each figure of `StepTiming` is, for command lines."""


def flag_of(name: str) -> str:
    """The command-line flag for a setting."""
    return "--" + name.replace("_", "-")


@dataclass(slots=True)
class StepWork:
    """What one step computes."""

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    """Σ over prefill tokens of the tokens each attends to."""
    decode_sequences: int = 0
    decode_context: int = 0
    """Σ over decoding sequences of the tokens each attends to."""

    def add_prefill(self, context: int, tokens: int) -> None:
        """`tokens` new ones after `context` computed ones; each attends to all before it and itself."""
        self.prefill_tokens += tokens
        self.prefill_pairs += tokens * context + tokens * (tokens + 1) // 2

    def add_decode(self, context: int) -> None:
        self.decode_sequences += 1
        self.decode_context += context


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds and rates of one worker. ValueError for those of none."""

    base_s: float = 0.006
    """Every step reads the weights once: 16.1 GB at 80 % of 3.35 TB/s."""
    prefill_tokens_per_s: float = 25_000.0
    """2 FLOP per parameter and token, 16.1 GFLOP, at 40 % of 989 TFLOP/s."""
    attention_s_per_pair: float = 1.05e-9
    """4 FLOP × 32 heads × 128 × 32 layers, 0.52 MFLOP per pair of tokens, at 500 TFLOP/s (FlashAttention-3's paper
    reports up to 740 at long contexts; chunks against a paged cache get less)."""
    decode_s_per_sequence: float = 0.000_1
    """Compute for its one token (40 µs at the prefill rate), sampling and the engine's bookkeeping."""
    kv_read_s_per_token: float = 4.9e-8
    """2 × 8 heads × 128 × 32 layers × 2 bytes, 131 kB per token of context, at 80 % of 3.35 TB/s."""

    def __post_init__(self) -> None:
        if not 0 < self.prefill_tokens_per_s < math.inf:
            raise ValueError("--prefill-tokens-per-s must be a number above 0")
        for name in ("base_s", "attention_s_per_pair", "decode_s_per_sequence", "kv_read_s_per_token"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{flag_of(name)} must be a number of seconds, not below 0")

    def step_time(self, work: StepWork) -> float:
        """Seconds for one step."""
        return (
            self.base_s
            + work.prefill_tokens / self.prefill_tokens_per_s
            + work.prefill_pairs * self.attention_s_per_pair
            + work.decode_sequences * self.decode_s_per_sequence
            + work.decode_context * self.kv_read_s_per_token
        )
