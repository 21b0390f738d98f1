"""Chat templates, rendered as Hugging Face's `apply_chat_template` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import jinja2

from router.tokens.content_format import wants_parts
from router.tokens.conversation import Message
from router.tokens.errors import CannotTokenize
from router.tokens.sandbox import environment

_OWN: Final = 128 * 1024
"""Letters that a prompt may have beyond `_GROWTH` for each byte of the request: a template has some of its own."""
_GROWTH: Final = 8
"""A token such as `eos_token` is a variable too, of any length, and shown with each message."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_SYSTEM_LATER: Final = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]

_ENVIRONMENT = environment()


class ChatTemplate:
    """One compiled template. `special_tokens`: bos_token, eos_token and the like, by name, as templates see them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CannotTokenize for a template that is not valid."""
        try:
            self._template = _ENVIRONMENT.from_string(source)
            self.wants_parts = wants_parts(_ENVIRONMENT, source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CannotTokenize("template_error", f"the chat template is not valid: {error}") from None
        self._globals = dict(self._template.globals)
        """Each render would gather them anew."""
        self._source = source
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        size: int = 0,
    ) -> str:
        """The prompt's text. `variables` are what the request adds (`chat_template_kwargs`); `size`: of the request, in
        bytes. Raises CannotTokenize."""
        if continue_final_message:
            return self._render_open_ended(messages, tools, variables or {}, size)
        return self._render(messages, tools, add_generation_prompt, variables or {}, size)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        size: int,
    ) -> str:
        own = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        values = {**self._special_tokens, "documents": None, **variables, **own}
        try:
            context = self._template.new_context(self._globals | values, shared=True)
            pieces = list(self._template.root_render_func(context))
        except CannotTokenize:
            raise
        except Exception as error:  # noqa: BLE001 - a template may fail in any way that Python can
            raise CannotTokenize("template_error", f"the chat template failed with {type(error).__name__}") from None
        if sum(map(len, pieces)) > _OWN + _GROWTH * size:
            raise CannotTokenize("malformed", "the chat template makes a text many times as long as the request")
        return "".join(pieces)

    def _render_open_ended(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        size: int,
    ) -> str:
        """Up to the end of the last message's text, found by a tag put there, as Hugging Face does it."""
        final, tagged = _tagged(messages[-1])
        text = self._render([*messages[:-1], tagged], tools, False, variables, size)
        if "content" not in self._source or final.strip() not in text or _TAG.strip() not in text:
            raise CannotTokenize("template_error", "the chat template does not show the message to be continued")
        end = text.rindex(_TAG.strip())
        # A template that trimmed the tag's blank trimmed the message's end as well.
        return text[:end] if text.startswith(_TAG, end) else text[:end].rstrip()


def _tagged(message: Message) -> tuple[str, Message]:
    """The message's last text, and the message with the tag behind that. The rest is shared: it may be nested deeper
    than Python copies."""
    content = message["content"]
    if isinstance(content, str):
        return content, {**message, "content": content + _TAG}
    if not content:
        raise CannotTokenize("malformed", "the message to be continued has no text")
    text: str = content[-1]["text"]
    return text, {**message, "content": [*content[:-1], {**content[-1], "text": text + _TAG}]}


class ChatTemplates:
    """A model's templates by name: "default" and perhaps "tool_use" and others."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._compiled = lru_cache(maxsize=8)(lambda source: ChatTemplate(source, special_tokens))
        self._takes_system_later: bool | None = None

    @property
    def takes_system_later(self) -> bool:
        """Whether messages of the system may stand behind others. If not, engines put what /v1/messages says in them in
        front."""
        if self._takes_system_later is None:
            self._takes_system_later = self._renders_system_later()
        return self._takes_system_later

    def _renders_system_later(self) -> bool:
        """Found out as vLLM does (entrypoints/anthropic/serving.py, 0.32)."""
        try:
            for with_tools in (False, True):
                self.choose(with_tools=with_tools).render(_SYSTEM_LATER, add_generation_prompt=False)
        except CannotTokenize:
            return False
        return True

    def choose(self, *, with_tools: bool) -> ChatTemplate:
        """Raises CannotTokenize."""
        # A single template serves for tools as well, and is called default.
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise CannotTokenize("no_template", "the tokenizer's folder holds no default chat template")
        return self._compiled(self._sources[name])
