"""A model's tokenizer from its folder: `tokenizer.json` and, for chats, its templates and special tokens."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers

from indexer.hashing import Tokens, pack_tokens
from publishers.logs import log_event
from router.tokens.chat_template import ChatTemplates
from router.tokens.errors import CannotTokenize

_log = logging.getLogger(__name__)

Encode = Callable[[str, bool], Tokens]
"""(text, add_special_tokens) to ids."""
Decode = Callable[[Sequence[int]], str]

_TAIL = 16
"""Tokens that decide whether the last character is whole: more than any has bytes."""

_UINT32: Final = np.dtype(np.uint32)
SEGMENT_CACHE = 64 * 2**20
"""Bytes of text between special tokens, and of its ids, that fastokens keeps for each model: a chat repeats all of the
conversation before it. A conversation takes about twice its length; those that go on stay."""

# vLLM renders these with code of its own although their folders hold a template.
_RENDERED_BY_CODE = frozenset({"gpt_oss"})

_PROBES = (
    "",
    " ",
    "The quick brown fox jumps over the lazy dog.",
    "  two  blanks,\ttabs\t\t,\r\nline breaks\n\n\n and trailing blanks   ",
    "def f(x):\n    return {'a': [1, 22, 333, 4444], \"b\": x**2}  # 3.14159e-10\n",
    "I'm sure you'LL find it's 1,234,567.89 €",
    "naïve café — “quotes”, ﬁ ligature, e\u0301 combining, ½ ² Ⅷ",
    "日本語のテキスト、中文文本，한국어 텍스트. Русский текст, ελληνικά, עברית, العربية, ไทย, हिन्दी",
    "🙂👩‍👩‍👧‍👦🇫🇷 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b\u00a0\ufeff\x00\x07\x7f",
    "<|im_start|><|endoftext|></s>[INST] <s>",
    "a" * 300 + " " * 300 + "0123456789" * 30,
)


class Tokenizer:
    """`templates` None: the engine does not render this model's chats from a template. `vocabulary`: every token id
    that the model knows is below it.
    """

    def __init__(
        self, encode: Encode, decode: Decode, templates: ChatTemplates | None, backend: str, vocabulary: int
    ) -> None:
        self._encode = encode
        self._decode = decode
        self.vocabulary = vocabulary
        self.templates = templates
        self.backend = backend

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        """Raises CannotTokenize for text that is not valid Unicode (half of a surrogate pair)."""
        try:
            return self._encode(text, add_special_tokens)
        except (UnicodeError, TypeError, ValueError) as error:
            raise CannotTokenize("malformed", f"the tokenizer refused the text: {type(error).__name__}") from None

    def ends_whole(self, tokens: Sequence[int]) -> bool:
        """Whether their text ends with a whole character: engines hold back what does not."""
        return not self._decode(tokens[-_TAIL:]).endswith("\ufffd")


def load_tokenizer(directory: Path) -> Tokenizer:
    """From a folder with tokenizer.json. Raises ValueError, naming the file, for what cannot be read."""
    path = directory / "tokenizer.json"
    try:
        reference = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise ValueError(f"{path} cannot be read: {error}.") from None
    reference.no_truncation()
    reference.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    with _reading_config(directory):
        _add_tokens(reference, config.get("added_tokens_decoder"))
    fast = _fastokens(reference)
    encode, decode = fast or (_encode_with(reference), _decode_with(reference))
    backend = "fastokens" if fast else "tokenizers"
    return Tokenizer(encode, decode, _templates(directory, config), backend, _vocabulary(reference, directory))


def _vocabulary(reference: tokenizers.Tokenizer, directory: Path) -> int:
    """Models often have rows for more ids than the tokenizer makes, and tokenizers may skip ids."""
    config = _read_json(directory / "config.json")
    text_config = config.get("text_config")
    sizes = [part.get("vocab_size") for part in (config, text_config) if isinstance(part, dict)]
    highest = max(reference.get_vocab(with_added_tokens=True).values(), default=-1)
    return max(highest + 1, *(size for size in sizes if isinstance(size, int)), 0)


def _encode_with(model: tokenizers.Tokenizer) -> Encode:
    def encode(text: str, add_special_tokens: bool) -> Tokens:
        return pack_tokens(model.encode(text, add_special_tokens=add_special_tokens).ids)

    return encode


def _decode_with(model: Any) -> Decode:
    def decode(tokens: Sequence[int]) -> str:
        return str(model.decode(list(tokens), skip_special_tokens=False))

    return decode


def _encode_flat(model: Any) -> Encode:
    """By fastokens, which hands out all ids as one buffer."""

    def encode(text: str, add_special_tokens: bool) -> Tokens:
        ids, _ = model.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        # A bytearray can be written to, as arrays of tokens can everywhere: kernels are compiled for each kind.
        return np.frombuffer(bytearray(ids), _UINT32)

    return encode


def _fastokens(reference: tokenizers.Tokenizer) -> tuple[Encode, Decode] | None:
    """The much faster library, when it is there and answers every probe as the reference does."""
    try:
        model = importlib.import_module("fastokens").Tokenizer.from_json_str(reference.to_str())
        model.enable_segment_cache(SEGMENT_CACHE)
        fast, slow = _encode_flat(model), _encode_with(reference)
        probes = [*_probes(reference)] * 2  # some come from the cache the second time
        differing = [probe for probe in probes if not _agree(fast, slow, probe)]
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001 - it raises plain Exception for models it does not know
        log_event(_log, logging.INFO, "fastokens cannot load this tokenizer", error=error)
        return None
    if differing:
        log_event(_log, logging.WARNING, "fastokens and tokenizers differ; using tokenizers", probes=len(differing))
    return None if differing else (fast, _decode_with(model))


def _agree(one: Encode, other: Encode, text: str) -> bool:
    return all(np.array_equal(one(text, special), other(text, special)) for special in (True, False))


def _probes(reference: tokenizers.Tokenizer) -> Iterator[str]:
    yield from _PROBES
    added = [token.content for token in reference.get_added_tokens_decoder().values()][:64]
    yield "".join(added)
    yield " text ".join(added)
    yield "\n".join(_PROBES)


def _add_tokens(reference: tokenizers.Tokenizer, decoder: object) -> None:
    """Those of tokenizer_config.json, added as `transformers` adds them: also where tokenizer.json has them with other
    flags, or as any other part of words."""
    entries = sorted(decoder.items(), key=lambda item: int(item[0])) if isinstance(decoder, dict) else []
    reference.add_tokens([_added_token(token) for _, token in entries])  # at once: each call takes time for all of them


def _added_token(token: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in token}
    return tokenizers.AddedToken(token["content"], **flags)


def _templates(directory: Path, config: Mapping[str, Any]) -> ChatTemplates | None:
    if _read_json(directory / "config.json").get("model_type") in _RENDERED_BY_CODE:
        return None
    return ChatTemplates(_template_sources(directory, config), _special_tokens(directory, config))


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over tokenizer_config.json, which holds one template or a list of named ones."""
    file = directory / "chat_template.jinja"
    named = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if file.exists():
        named["default"] = file
    if named:
        return {name: path.read_text("utf-8") for name, path in named.items()}
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    with _reading_config(directory):
        return {entry["name"]: entry["template"] for entry in given} if isinstance(given, list) else {}


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By the names that templates use; a token is text or an object with its `content`."""
    merged = {**_read_json(directory / "special_tokens_map.json"), **config}
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = merged.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


@contextmanager
def _reading_config(directory: Path) -> Iterator[None]:
    """Raises ValueError where it is JSON, and not what it should be."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{directory / 'tokenizer_config.json'} cannot be read: {error!r}.") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Empty when there is no such file; raises ValueError for one that cannot be read."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    return content if isinstance(content, dict) else {}
