"""The names under which engines keep their blocks in Mooncake Store, and what its master tells of them.

Pure: tokens to keys, answers to facts. Who asks, when, and what it is worth is the router's business.
"""

from __future__ import annotations

from engines.store.keys import Digest, Verdict
from engines.store.master import Counted, Health, read_counted, read_health
from engines.store.messages import HashName, warm_up
from engines.store.query import Segment, Stored, query_path, read_keys, read_present, read_query, read_segments
from engines.store.sglang import SglangLayout, names_model
from engines.store.size import bytes_per_token, of_language_model
from engines.store.survey import Kept, survey
from engines.store.verify import Layout, verify
from engines.store.vllm import (
    DEFAULT_SEED,
    VllmGroup,
    VllmLayout,
    seed_of,
)

__all__ = [
    "DEFAULT_SEED",
    "Counted",
    "Digest",
    "HashName",
    "Health",
    "Kept",
    "Layout",
    "Segment",
    "SglangLayout",
    "Stored",
    "Verdict",
    "VllmGroup",
    "VllmLayout",
    "bytes_per_token",
    "names_model",
    "of_language_model",
    "query_path",
    "read_counted",
    "read_health",
    "read_keys",
    "read_present",
    "read_query",
    "read_segments",
    "seed_of",
    "survey",
    "verify",
    "warm_up",
]
