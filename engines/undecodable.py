"""What bytes are that are no JSON, or no msgpack, or not of the shape wanted."""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that decoding raises: also for text that is not UTF-8, and for what is nested too deep."""
