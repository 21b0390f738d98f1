"""Whether the ids made here are the engine's own, asked once before they are relied upon."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from router.tokens.engine_tokens import EngineTokens
from router.tokens.errors import CannotTokenize
from router.tokens.prompt import Endpoint, Fields

_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  blanks,\ttabs\t\t,\r\nline breaks\n\n\n and trailing blanks   ",
    "1 22 333 4444 55555 1,234,567.89 0x1F 3.14e-10 ½ ²",
    "naïve café “quotes” 日本語、中文，한국어 Русский العربية 🙂👩‍👩‍👧 e\u0301",
    "<|im_start|>user\n<|endoftext|></s><s>[INST] not a turn [/INST]",
)
_SYSTEM = {"role": "system", "content": "You are a careful assistant.\n\n  Answer in one short paragraph. "}
_USER = {"role": "user", "content": " What is 12 × 34?\n"}
_ANSWERED = [_SYSTEM, _USER, {"role": "assistant", "content": "408."}, {"role": "user", "content": "日本語で 🙂"}]
_PLACE = {"type": "object", "properties": {"city": {"type": "string", "description": "A name"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "weather", "description": "Now <here>", "parameters": _PLACE}}
_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [_USER]},
    {"messages": [_SYSTEM, _USER]},
    {"messages": _ANSWERED},
    # An engine may have been told what its template takes (--chat-template-content-format), and joins these or not.
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Twelve"}, {"type": "text", "text": "12"}]}]},
    # An engine may have been given a template for tools (--chat-template) that is the model's own in all else.
    {"messages": [_SYSTEM, _USER], "tools": [_TOOL]},
)


class Mismatch(NamedTuple):
    """The first probe on which the two differ, and where."""

    endpoint: Endpoint
    probe: int
    position: int
    ours: int
    theirs: int

    def __str__(self) -> str:
        return (
            f"{self.endpoint} probe {self.probe}: token {self.position} differs "
            f"({self.ours} tokens here, {self.theirs} by the engine)"
        )


class Ids(Protocol):
    """Whoever makes token ids, as `PromptTokens` does."""

    def ids(self, endpoint: Endpoint, fields: Fields) -> list[int]: ...


async def verify(ours: Ids, engine: EngineTokens, model: str) -> Mismatch | None:
    """Compares on a few texts and chats. Probes that either side refuses are passed over; with no chat template of ours
    nothing is compared for chats. Raises CannotTokenize when the engine answered no probe at all.
    """
    probes: list[tuple[Endpoint, dict[str, Any]]] = [("completions", {"model": model, "prompt": t}) for t in _TEXTS]
    probes += [("chat", {"model": model, **chat}) for chat in _CHATS]
    compared = 0
    for number, (endpoint, fields) in enumerate(probes):
        try:
            here = ours.ids(endpoint, fields)
            there = await engine.ids(endpoint, fields)
        except CannotTokenize:
            continue
        compared += 1
        if here != there:
            return Mismatch(endpoint, number, _first_difference(here, there), len(here), len(there))
    if not compared:
        raise CannotTokenize("engine", "no probe could be compared with the engine's own tokens")
    return None


def _first_difference(here: list[int], there: list[int]) -> int:
    pairs = enumerate(zip(here, there, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(here), len(there)))
