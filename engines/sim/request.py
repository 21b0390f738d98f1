"""A request as the scheduler sees it: a prompt, what was generated so far, and the blocks that hold their KV."""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.sim.answers import answer_start
from engines.sim.cache import BlockId
from indexer.hashing import Tokens, chain_hashes, pack_tokens, root_hash
from indexer.types import PLAIN, Namespace, SequenceHash

APART = 1009
"""Tokens of the rank's text between the beginnings of two answers to one prompt."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way to `max_tokens` generated tokens; made by `make_request`."""

    request_id: str
    tokens: list[int]
    """The prompt, and what was generated so far."""
    prompt_length: int
    max_tokens: int
    namespace: Namespace
    hashes: list[SequenceHash]
    """Of the leading full blocks of `tokens`; extended as generated blocks fill."""
    answer_start: int
    """The answer is read from here in the rank's `answers`, cyclically."""
    arrival: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens found in the cache at the first admission."""
    admitted: bool = False
    computed: int = 0
    """Leading tokens whose KV is held."""
    blocks: list[BlockId] = field(default_factory=list)
    stored: int = 0
    """Leading blocks that the cache knows by hash."""
    remote: bool = False
    """The KV of its prompt comes from another worker; after a preemption it is computed here."""
    keep: bool = False
    """Its blocks stay held when it has finished, until `let_go`."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def finished(self) -> bool:
        return self.generated >= self.max_tokens


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    block_size: int,
    namespace: Namespace = PLAIN,
    *,
    remote: bool = False,
    keep: bool = False,
    answers: Tokens | None = None,
    choice: int = 0,
) -> Request:
    """Raises OverflowError or TypeError for what is no token id, ValueError for an empty prompt or no token to make.

    The answer depends on the prompt's tokens alone, so a greedy repeat is equal, salted or not. With `answers`, which
    the rank's are, a prompt that ends with the beginning of an answer goes on with its rest. `choice` tells the answers
    to one prompt apart.
    """
    if not prompt or max_tokens < 1:
        raise ValueError("an empty prompt, or max_tokens below 1")
    packed = pack_tokens(prompt)
    hashes = chain_hashes(packed, block_size, root_hash(namespace)).tolist()
    return Request(
        request_id=request_id,
        tokens=prompt,
        prompt_length=len(prompt),
        max_tokens=max_tokens,
        namespace=namespace,
        hashes=hashes,
        answer_start=answer_start(packed, answers) + choice * APART,
        remote=remote,
        keep=keep,
    )
