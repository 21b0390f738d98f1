"""How to find out what a worker is, as a dialogue without I/O: yields paths to GET, is sent what came back.

A shell drives it with its own HTTP client:

    steps = probe(host="10.0.0.7")
    path = next(steps)
    while True:
        try:
            path = steps.send(await fetch(path))
        except StopIteration as done:
            return done.value
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from engines.description import EngineDescription


class Answer(NamedTuple):
    """An HTTP answer; status 0 when there was none."""

    status: int
    body: bytes = b""


Probe = Generator[str, Answer, EngineDescription]
