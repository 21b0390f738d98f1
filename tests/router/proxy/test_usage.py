"""The usage of an answer, read from its end and changed in its bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.proxy.usage import read_usage, with_cached


def usage(prompt: object, cached: object) -> bytes:
    return json.dumps({"usage": {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}}).encode()


@pytest.mark.parametrize(
    ("recent", "latest", "told"),
    [
        (b"", usage(9, 8), (9, 8)),
        (usage(9, 8), b"data: [DONE]\n\n", (9, 8)),
        (usage(9, 8)[:30], usage(9, 8)[30:], (9, 8)),
        (b"", usage(9, None), (9, None)),
        (b"", b'{"usage":null}', (None, None)),
        (b"", b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}', (9, None)),
        (b"", b"", (None, None)),
        (usage(1, 1), usage(9, 8), (9, 8)),
        (b"", b'{"text":"\\"usage\\":{\\"prompt_tokens\\":5}"}', (None, None)),
        (usage(9, 8), b"x" * 5000, (None, None)),
        (b"", usage(10**15, 8), (None, None)),
        (b"", usage(9, 10**15), (9, None)),
        (b"", b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8},"output_tokens":1}}', (9, 8)),
        (b"", b'{"usage":{"input_tokens":9,"output_tokens":1}}', (9, None)),
        (b"", b'{"usage":{"input_tokens":1,"cache_read_input_tokens":8,"output_tokens":1}}', (9, 8)),
        (b"", b'"usage":{"input_tokens":1,"cache_creation_input_tokens":3,"cache_read_input_tokens":0}', (4, 0)),
        (b"", b'"usage":{"input_tokens":1,"cache_creation_input_tokens":null,"cache_read_input_tokens":8}', (9, 8)),
        (b'"text":"a"', b'"meta_info":{"id":"x","prompt_tokens":9,"completion_tokens":1,"cached_tokens":8}}', (9, 8)),
        (b'data: {"meta_info":{"prompt_tokens":9,"cached_tokens":8}}\n\n', b"data: [DONE]\n\n", (9, 8)),
        (b"", b'[{"meta_info":{"prompt_tokens":9,"cached_tokens":8}}]\n', (None, None)),
        (b'"meta_info":{"prompt_tokens":9,"cached_tokens":8},"index":1}', b"data: [DONE]\n\n", (None, None)),
        (b"", b'{"request_id":"x",' + usage(9, 8) + b',"choices":[' + b"9" * 9000, (9, 8)),
        (b'{"request_id":"x",' + usage(9, 8) + b',"choices":[' + b"9" * 9000, b"9" * 9000, (9, 8)),
        (b'{"request_id":"x","usage":null,"choices":[' + b"9" * 9000, b"9" * 9000, (None, None)),
        (b'{"choices":[{"text":"' + b"9" * 9000, b'{"request_id":"x"}', (None, None)),
        (usage(9, 8)[:25] + b"9" * 3000, b"9" * 3000, (None, None)),
    ],
)
def test_what_an_answers_end_tells(recent: bytes, latest: bytes, told: tuple[int | None, int | None]) -> None:
    assert read_usage(recent, latest) == told


@given(st.text(), st.none() | st.integers(0, 10**9), st.integers(0, 10**9))
def test_only_the_number_is_changed(text: str, before: int | None, after: int) -> None:
    document = {
        "choices": [{"text": text + '"cached_tokens":1', "n": {"cached": 1}}],
        "usage": {"cached_tokens": before},
    }
    for separators in ((",", ":"), (", ", ": ")):
        changed = json.loads(with_cached(json.dumps(document, separators=separators).encode(), after))
        assert changed == {**document, "usage": {"cached_tokens": after}}
