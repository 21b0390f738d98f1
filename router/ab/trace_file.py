"""Reads recorded traces: JSON lines, as Mooncake publishes them and as Qwen-Bailian does, and CSV (`length_trace`).

JSON lines give a hash id for each block of a prompt. The two formats differ in the tokens of a block (512 and 16), in
the unit of time (Mooncake's is ms; https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon has seconds, and a
`chat_id`), and in whether an id stands for a block's content after all before it, or for the content alone.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from engines.answers import UNDECODABLE
from router.ab.errors import RunError
from router.ab.length_trace import find_columns, read_lengths
from router.ab.trace import BLOCK_TOKENS, Row, synthesize

FORMATS = "JSON lines in Mooncake's or Qwen-Bailian's format, or CSV in Azure's or BurstGPT's"
BLOCK_SIZES = (BLOCK_TOKENS, 256, 128, 64, 32, 16)
"""Tokens per hash id that a trace may have. The first one counts where its rows are too short to tell."""


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    chat_id: int | str | None = None

    @property
    def milliseconds(self) -> float:
        return self.timestamp if self.chat_id is None else self.timestamp * 1000


def load(trace: str, seed: int) -> list[Row]:
    """Loads a trace: a file, `synthetic` or `synthetic:KIND`. Raises RunError as `read` and `synthesize` do."""
    kind = trace.partition(":")[2]
    return synthesize(kind or "conversation", seed) if _is_made(trace) else read(Path(trace))


def file_of(trace: str) -> str | None:
    """None where it is made, and not read."""
    return None if _is_made(trace) else trace


def _is_made(trace: str) -> bool:
    return trace.partition(":")[0] == "synthetic"


def check_readable(trace: str) -> None:
    """Checks that a trace can be read again and again, before other work is done. Raises RunError."""
    if _is_made(trace):
        return
    path = Path(trace)
    try:
        piped = path.is_fifo()
        if not piped:
            path.open("rb").close()
    except OSError as error:
        raise _unreadable(path, error) from None
    if piped:
        raise RunError(f"the trace {path} is a pipe, which can be read only once; give a file")


def read(path: Path) -> list[Row]:
    """The rows of a trace file in order of arrival, with the first moved to time 0, since some traces start with the
    hour or count from 1970. Raises RunError naming the line of the first malformed row."""
    try:
        texts = path.read_bytes().removeprefix(BOM_UTF8).splitlines()  # which Excel writes, among others
    except OSError as error:
        raise _unreadable(path, error) from None
    columns = find_columns(texts[0].decode(errors="replace")) if texts else None
    if columns:
        rows = read_lengths([text.decode(errors="replace") for text in texts], columns, str(path))
    else:
        rows = _read_lines(texts, path)
    if not rows:
        raise RunError(f"the trace {path} has no rows; give a file with one request per line")
    began = min(row.timestamp for row in rows)
    moved = [msgspec.structs.replace(row, timestamp=row.timestamp - began) for row in rows]
    return sorted(moved, key=lambda row: row.timestamp)


def _read_lines(texts: Sequence[bytes], path: Path) -> list[Row]:
    lines = {number: _parse(text, f"{path}:{number}") for number, text in enumerate(texts, 1) if text.strip()}
    if not lines:
        return []
    size = _block_size(lines.values())
    for number, line in lines.items():
        _check_ids(line, size, f"{path}:{number}")
    return [
        Row(line.milliseconds, line.input_length, line.output_length, ids, size)
        for line, ids in zip(lines.values(), _chained([line.hash_ids for line in lines.values()]), strict=True)
    ]


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot read the trace {path}: {error.strerror}; give --trace FILE or --trace synthetic")


def _parse(text: bytes, where: str) -> _Line:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except UNDECODABLE as error:
        raise RunError(f"{where}: not a trace row: {error}") from None
    if line.input_length < 1 or line.output_length < 1 or line.timestamp < 0:
        raise RunError(f"{where}: input_length and output_length must be at least 1, timestamp at least 0")
    return line


def _block_size(lines: Iterable[_Line]) -> int:
    """The block size that explains the row with the most ids."""
    longest = max(lines, key=lambda line: len(line.hash_ids))
    fitting = (size for size in BLOCK_SIZES if len(longest.hash_ids) == _blocks(longest, size))
    return next(fitting, BLOCK_TOKENS)


def _check_ids(line: _Line, size: int, where: str) -> None:
    if len(line.hash_ids) != _blocks(line, size):
        needed = f"one for every {size} of {line.input_length} input tokens makes {_blocks(line, size)}"
        raise RunError(f"{where}: {len(line.hash_ids)} hash_ids, but {needed}")


def _blocks(line: _Line, size: int) -> int:
    return -(-line.input_length // size)


def _chained(prompts: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
    """The same prompts with ids that stand for a block's content after all before it, if they do not already."""
    before: dict[int, int | None] = {}
    pairs = (pair for ids in prompts for pair in zip((None, *ids), ids, strict=False))
    if all(before.setdefault(one, last) == last for last, one in pairs):
        return prompts
    names: dict[tuple[int, int], int] = {}

    def name(last: int, one: int) -> int:
        return names.setdefault((last, one), len(names))

    return [tuple(accumulate(ids, name, initial=-1))[1:] for ids in prompts]
