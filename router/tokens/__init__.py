"""From a request to the token ids that the engine will make of it.

Owns tokenizers, chat templates, where they are found, and the fallback of asking an engine. Knows nothing of workers,
routing or HTTP. What cannot be done exactly as the engine does it is refused with `CannotTokenize`: a wrong id is worse
than none, since every block after it would look different.
"""

from router.tokens.engine_tokens import EngineTokens, Post
from router.tokens.errors import CannotTokenize, Reason
from router.tokens.ids import read_ids
from router.tokens.other_prompts import other_tokens
from router.tokens.prompt import Endpoint, Fields, PromptTokens, first_prompt
from router.tokens.source import find_tokenizer
from router.tokens.stand_ins import BYTES_PER_TOKEN, stand_ins
from router.tokens.tokenizer import Tokenizer, load_tokenizer
from router.tokens.verify import Mismatch, verify

__all__ = [
    "BYTES_PER_TOKEN",
    "CannotTokenize",
    "Endpoint",
    "EngineTokens",
    "Fields",
    "Mismatch",
    "Post",
    "PromptTokens",
    "Reason",
    "Tokenizer",
    "find_tokenizer",
    "first_prompt",
    "load_tokenizer",
    "other_tokens",
    "read_ids",
    "stand_ins",
    "verify",
]
