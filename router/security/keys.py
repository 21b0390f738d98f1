"""API keys: reads their file, and finds the owner of a key.

A key is 256 random bits, which nobody can guess, so a plain SHA-256 of it is safe to store. Slow and salted hashes
protect secrets that people choose, which can be guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec

from publishers.credentials import read_file
from router.yaml_text import NotYaml, read_yaml

PREFIX = "kvr-"
"""By which scanners for leaked secrets can know one."""
_NO_FIELD = re.compile(r"unknown field `(?![a-z0-9_]+`).*?`(?= - at |$)", re.DOTALL)
"""In msgspec's words, one whose name may be a key."""
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the file. A limit of None is no limit."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")]
    """The tenant's."""
    sha256: _Digest | Annotated[list[_Digest], msgspec.Meta(min_length=1)]
    """Of the key; several while one takes another's place."""
    admin: bool = False
    requests_per_minute: Annotated[float, msgspec.Meta(ge=1e-6)] | None = None
    """With less, the time until the next one would soon be no number any more."""
    concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    models: frozenset[str] | None = None

    @property
    def digests(self) -> list[str]:
        return [self.sha256] if isinstance(self.sha256, str) else self.sha256


class Keys:
    """All valid keys."""

    def __init__(self, entries: Sequence[Key]) -> None:
        """Raises ValueError if a name or a digest occurs twice."""
        self._by_digest: dict[str, Key] = {}
        self.by_name = {entry.name: entry for entry in entries}
        if len(self.by_name) < len(entries):
            raise ValueError("two entries have the same name; one's second key goes into its list sha256: [.., ..].")
        for entry in entries:
            for digest in entry.digests:
                if digest in self._by_digest:
                    raise ValueError(f"{self._by_digest[digest].name} and {entry.name} have the same key.")
                self._by_digest[digest] = entry

    def find(self, key: bytes) -> Key | None:
        """The entry of a key. The time that a look-up takes reveals something of digests only, which do not give away a
        key."""
        return self._by_digest.get(hashlib.sha256(key).hexdigest())


def read_keys(path: str) -> Keys:
    """Reads the file. Raises ValueError with a message that quotes no value of it, since one may be a key by
    mistake."""
    text = read_file("--api-keys", path)
    try:
        return Keys(_entries(read_yaml(text)))
    except NotYaml as error:
        raise ValueError(f"--api-keys: {path} is not valid YAML{error.line}.") from None
    except msgspec.ValidationError as error:
        expected = "is no list of entries as `kv-router keys new NAME` prints them"
        said = _NO_FIELD.sub("an unknown field", str(error))
        raise ValueError(f"--api-keys: {path} {expected}: {said}.") from None
    except ValueError as error:
        raise ValueError(f"--api-keys: {path}: {error}") from None


def _entries(told: object) -> list[Key]:
    """One by one, so that others have their turn: of 50,000 at once nothing else would happen for 0.1 s."""
    if isinstance(told, list):
        with contextlib.suppress(msgspec.ValidationError):
            return [msgspec.convert(each, Key) for each in told]
    return msgspec.convert(told, list[Key])  # which says where it is wrong


def new_key() -> tuple[str, str]:
    """Makes a key. Returns it and its digest."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()
