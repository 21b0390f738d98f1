"""The one way in which turning a request into tokens fails."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "no_tokenizer", "no_template", "multimodal", "unsupported", "untold", "malformed", "template_error", "engine", "api"
]
"""Few and fixed, so that they can label a metric."""


class CannotTokenize(Exception):
    """`reason` classes the failure; the text says what it was, without quoting the prompt."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason

    @property
    def engine_can(self) -> bool:
        """Whether an engine's own answer would help: not for images, whose tokens do not tell one from another, nor for
        what the question cannot tell it."""
        return self.reason in {"no_tokenizer", "no_template", "unsupported", "template_error"}
