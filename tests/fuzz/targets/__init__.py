"""One file for each surface that reads what others sent; `ALL` has every target by its name."""

from __future__ import annotations

from tests.fuzz.target import Target
from tests.fuzz.targets import (
    admin,
    chunks,
    disaggregation,
    edited,
    engine_answers,
    event_plane,
    front,
    heads,
    inference,
    kv_events,
    settings,
    store,
    upstream,
    zmtp,
)

_FILES = (
    front,
    heads,
    upstream,
    chunks,
    edited,
    zmtp,
    kv_events,
    event_plane,
    engine_answers,
    store,
    disaggregation,
    inference,
    settings,
    admin,
)
ALL: dict[str, Target] = {target.name: target for file in _FILES for target in file.TARGETS}
