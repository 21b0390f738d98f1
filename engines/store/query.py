"""What a Mooncake master tells over HTTP, on its metrics port. Only /query_key takes a lease on an object, and before
0.3.12 /batch_query_keys.

GET /batch_query_keys?keys=K,K,…   {"success": true, "data": {K: {"ok": …, "values": [replica, …], …}, …}}
GET /query_key?key=K               200 or 404
GET /get_all_keys                  a key a line
GET /get_segments_detail           {"segments": [{"segment_name", "te_endpoint", …}, …]}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_letters, digits
from typing import Annotated, Generic, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from engines.answers import decoded
from indexer.types import Tier

_T = TypeVar("_T")

BATCH_QUERY, ALL_KEYS, SEGMENTS = "/batch_query_keys", "/get_all_keys", "/get_segments_detail"
QUERY = "/query_key"
MOST_AT_ONCE = 500
"""Keys in one query: some 70 kB of URL."""
_PLAIN = "@:/,"
"""Sent as they are: what vLLM and SGLang write then stays short."""
_LEGAL = _PLAIN + "!$'()*+;=?"
"""What may stand in the value of a URL's query."""
_PLAIN_BYTES = (ascii_letters + digits + "_.~-" + _PLAIN).encode()


class Stored(NamedTuple):
    """An object that can be read. `owners`: where its replicas in memory are, as `Segment.endpoint` calls them."""

    size: int
    tier: Tier
    owners: tuple[str, ...] = ()


class Segment(msgspec.Struct, frozen=True):
    """Memory that a process offers to the store."""

    name: str
    endpoint: str
    size: int = 0
    used: int = 0


def query_path(keys: Sequence[str]) -> str | None:
    """The path that asks which of `keys` are there. None: one key has a comma, and cannot be asked for."""
    asked = ",".join(keys)
    if asked.count(",") != len(keys) - 1:
        return None
    return f"{BATCH_QUERY}?keys={_quoted(asked)}"


def in_parts(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """`keys` in parts of as many as one query may ask for."""
    return (keys[at : at + MOST_AT_ONCE] for at in range(0, len(keys), MOST_AT_ONCE))


def lease_path(key: str) -> str:
    """The path that takes a lease on an object; the answer's status is 200 if it is there. The master does not decode
    the key: one with an escaped character is not found, so all characters that may are sent as they are."""
    return f"{QUERY}?key={quote(key, safe=_LEGAL, errors='surrogatepass')}"


def _quoted(keys: str) -> str:
    plain = keys.isascii() and not keys.encode().translate(None, _PLAIN_BYTES)
    return keys if plain else quote(keys, safe=_PLAIN, errors="surrogatepass")


def read_query(body: bytes) -> dict[str, Stored]:
    """The objects of a /batch_query_keys answer that are there. Raises ValueError for anything but such an answer."""
    answer = decoded(_decode_answer, body)
    return {key: stored for key, found in _data(answer).items() if (stored := _stored(found)) is not None}


def read_present(body: bytes) -> set[str]:
    """The keys of a /batch_query_keys answer whose objects can be read. Raises ValueError as `read_query` does. Of a
    thousand keys that takes a fifth of the time."""
    answer = decoded(_decode_presence, body)
    return {key for key, found in _data(answer).items() if found.ok and found.has_any}


def read_keys(body: bytes) -> list[str]:
    """The keys in an answer of /get_all_keys. Raises ValueError for what is no text."""
    return body.decode().splitlines()


def read_segments(body: bytes) -> list[Segment]:
    """The segments in an answer of /get_segments_detail. Raises ValueError for any other answer."""
    found = decoded(_decode_segments, body).segments
    return [Segment(s.segment_name, s.te_endpoint, s.size_bytes, s.allocator_used_bytes) for s in found]


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Replica(msgspec.Struct):
    size_: _Size = 0
    transport_endpoint_: str = ""


class _OnDisk(msgspec.Struct):
    size_: _Size = 0
    object_size: _Size = 0


class _Object(msgspec.Struct):
    ok: bool
    values: list[_Replica] | None = None
    disk_values: list[_OnDisk] | None = None
    local_disk_values: list[_OnDisk] | None = None
    nof_values: list[_OnDisk] | None = None


class _Answer(msgspec.Struct, Generic[_T]):
    success: bool
    data: dict[str, _T] | None = None
    error: str | None = None


_ABSENT = msgspec.Raw()
_NONE = (b"", b"[]", b"null")


class _Presence(msgspec.Struct):
    ok: bool
    values: msgspec.Raw = _ABSENT
    disk_values: msgspec.Raw = _ABSENT
    local_disk_values: msgspec.Raw = _ABSENT
    nof_values: msgspec.Raw = _ABSENT

    @property
    def has_any(self) -> bool:
        if self.values is not _ABSENT and bytes(self.values) not in _NONE:
            return True  # in memory, as nearly all are
        return any(bytes(one) not in _NONE for one in (self.disk_values, self.local_disk_values, self.nof_values))


class _Segment(msgspec.Struct):
    segment_name: str
    te_endpoint: str = ""
    size_bytes: _Size = 0
    allocator_used_bytes: _Size = 0


class _Segments(msgspec.Struct):
    segments: list[_Segment]


def _data(answer: _Answer[_T]) -> dict[str, _T]:
    if not answer.success or answer.data is None:
        raise ValueError(f"the store answered with an error: {answer.error or 'it did not say which'}")
    return answer.data


def _stored(found: _Object) -> Stored | None:
    if not found.ok:
        return None
    if found.values:
        owners = dict.fromkeys(part.transport_endpoint_ for part in found.values)
        return Stored(found.values[0].size_, Tier.CPU, tuple(owners))
    on_disk = found.disk_values or found.local_disk_values or found.nof_values
    return Stored(on_disk[0].size_ or on_disk[0].object_size, Tier.DISK) if on_disk else None


_decode_answer = msgspec.json.Decoder(_Answer[_Object]).decode
_decode_presence = msgspec.json.Decoder(_Answer[_Presence]).decode
_decode_segments = msgspec.json.Decoder(_Segments).decode
