"""Text to token ids and back, and the text that answers are read from.

Without a tokenizer.json a token is one UTF-8 byte (id = byte + 3) and a chat is rendered like ChatML. With one, its ids
and the folder's chat template are used as an engine would.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jinja2.sandbox
import msgspec
import tokenizers

Message = dict[str, Any]

BYTE_OFFSET = 3
"""As in ByT5 (google-research/byt5): ids 0–2 are padding, end and unknown."""

WORDS = (
    "a about after again all also an and any are as at back be because been before block but by cache can chain come "
    "cost could count day do down each early end even event every few find first for from gave get give good great had "
    "hash has have he held here how if in index into is it its just keep key kind know last late less like line little "
    "load long look made make many may more most must near new next no not now of old on one only or order other our "
    "out over own page part path place plan point prefix queue rather read route same say see serve set she should "
    "small so some still such take than that the their them then there these they thing think this those through time "
    "to token too turn two under until up use value very want was way we well were what when where which while who "
    "will with word work worker would write year yet you"
)

ANSWER_TOKENS = 8192


class Tokenizer(Protocol):
    """Encodes text, decodes one token, renders a chat to text."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def piece(self, token: int) -> str: ...

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        """ValueError when the messages do not fit the template; `variables` are tools and the like."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:  # noqa: ARG002 - there are none
        return [byte + BYTE_OFFSET for byte in text.encode("utf-8", "surrogatepass")]

    def piece(self, token: int) -> str:
        return bytes([token - BYTE_OFFSET]).decode("utf-8", "replace")

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: dict[str, Any],  # noqa: ARG002 - this template has none
    ) -> str:
        turns = [f"<|im_start|>{message['role']}\n{text_of(message)}<|im_end|>\n" for message in messages]
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class FileTokenizer:
    """A Hugging Face tokenizer.json, and beside it the chat template that tokenizer_config.json has or names."""

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json" if path.is_dir() else path))
        self._config = _read_json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        source = template_file.read_text() if template_file.exists() else self._config.get("chat_template")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(source) if isinstance(source, str) else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def piece(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        if self._template is None:
            return ByteTokenizer().render(messages, add_generation_prompt, variables)
        special = {name: self._config[name] for name in ("bos_token", "eos_token") if name in self._config}
        flat = [{**message, "content": text_of(message)} for message in messages]
        try:
            return self._template.render(
                **special, **variables, messages=flat, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template failed: {error}") from error


def text_of(message: Message) -> str:
    """A message's content: text, or a list of parts whose texts are joined as vLLM does (others count for nothing)."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return "\n".join(text for text in texts if text and isinstance(text, str))


def load_tokenizer(path: str | None) -> Tokenizer:
    """ValueError where there is none that can be used."""
    if path is None:
        return ByteTokenizer()
    try:
        return FileTokenizer(Path(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise ValueError(
            f"--tokenizer takes a folder with tokenizer.json, or that file; {path} cannot be read: {error}"
        ) from error


class Answers(NamedTuple):
    """One long text of words; every answer is a stretch of it, so that its tokens, decoded and encoded again, recur."""

    tokens: list[int]
    pieces: list[str]
    json_pieces: list[bytes]
    """Each piece as a JSON string."""

    def text(self, start: int, count: int) -> str:
        """`count` pieces from `start` on, cyclically."""
        length = len(self.pieces)
        return "".join(self.pieces[(start + i) % length] for i in range(count))


def make_answers(tokenizer: Tokenizer, seed: int) -> Answers:
    """At least ANSWER_TOKENS tokens of random words."""
    random_words = random.Random(seed)  # noqa: S311 - words, not secrets
    words = WORDS.split()
    tokens: list[int] = []
    while len(tokens) < ANSWER_TOKENS:
        text = "".join(" " + random_words.choice(words) for _ in range(ANSWER_TOKENS // 8))
        tokens += tokenizer.encode(text, add_special_tokens=False)
    texts = {token: tokenizer.piece(token) for token in set(tokens)}  # a few hundred
    as_json = {token: msgspec.json.encode(text) for token, text in texts.items()}
    return Answers(tokens, [texts[token] for token in tokens], [as_json[token] for token in tokens])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content
