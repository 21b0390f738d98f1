"""What clients ask, and the only right answer to it: a simulated engine's is a function of the prompt alone."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec

from engines.sim.request import make_request
from engines.sim.settings import SimSettings
from engines.sim.tokens import WORDS, ByteTokenizer, Message, make_answers
from indexer.hashing import pack_tokens

PREFIXES = 24
"""Texts that prompts open with: few enough to be shared, too many for one worker's cache."""
LEAST_TOKENS = 4

_TOKENIZER = ByteTokenizer()
_ANSWERS = make_answers(_TOKENIZER, SimSettings().seed)
_IDS = pack_tokens(_ANSWERS.tokens)
_WORDS = WORDS.split()
_encode = msgspec.json.Encoder().encode


class Question(NamedTuple):
    path: str
    body: bytes
    streamed: bool
    text: str
    """What every engine answers."""


class Questions:
    """Completions and chats, streamed and not, many with the same beginnings."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        common = random.Random(0)
        self._prefixes = [_words(common, common.randint(10, 120)) for _ in range(PREFIXES)]

    def next(self, streamed: bool | None = None, long: bool = False) -> Question:
        draw = self._draw
        prompt = draw.choice(self._prefixes) + _words(draw, draw.randint(1, 20))
        tokens = draw.randint(200, 400) if long else draw.randint(LEAST_TOKENS, 40)
        asked = draw.random() < 0.7 if streamed is None else streamed
        return (chat if draw.random() < 0.4 else completion)(prompt, tokens, asked)


def completion(prompt: str, tokens: int, streamed: bool, ids: bool = False) -> Question:
    """`ids`: the prompt is sent as tokens, which nobody need be asked for."""
    said = _TOKENIZER.encode(prompt, True) if ids else prompt
    body = {"model": "sim", "prompt": said, "max_tokens": tokens, "stream": streamed}
    return Question("/v1/completions", _encode(body), streamed, _answer(prompt, tokens))


def chat(prompt: str, tokens: int, streamed: bool) -> Question:
    messages: list[Message] = [{"role": "system", "content": prompt[:200]}, {"role": "user", "content": prompt[200:]}]
    body = {"model": "sim", "messages": messages, "max_tokens": tokens, "stream": streamed}
    rendered = _TOKENIZER.render(messages, True, {})
    return Question("/v1/chat/completions", _encode(body), streamed, _answer(rendered, tokens))


def _answer(prompt: str, tokens: int) -> str:
    request = make_request("", _TOKENIZER.encode(prompt, True), tokens, SimSettings().block_size, answers=_IDS)
    return _ANSWERS.text(request.answer_start, tokens)


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(count)) + " "
