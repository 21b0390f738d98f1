"""Why a request cannot be turned into tokens."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "no_tokenizer", "no_template", "multimodal", "unsupported", "untold", "malformed", "template_error", "engine", "api"
]
"""Few and fixed, so that they can label a metric."""


class CannotTokenize(Exception):
    """`reason` is the kind of failure; the message says what it was, and never quotes the prompt."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason

    @property
    def engine_can(self) -> bool:
        """Whether it would help to ask an engine for the tokens. Not where a prompt has images, since different images
        get the same tokens; nor where a request says something that cannot be passed on with the question."""
        return self.reason in {"no_tokenizer", "no_template", "unsupported", "template_error"}
