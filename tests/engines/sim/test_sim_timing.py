"""The timing model: each term alone, and the numbers that its defaults claim."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from engines.sim.timing import StepTiming, StepWork, flag_of


def work(**fields: int) -> StepWork:
    return StepWork(**fields)


@pytest.mark.parametrize(
    ("timing", "done", "seconds"),
    [
        (StepTiming(base_s=2.0), StepWork(), 2.0),
        (StepTiming(base_s=0, prefill_tokens_per_s=100), work(prefill_tokens=50), 0.5),
        (StepTiming(base_s=0, attention_s_per_pair=0.1), work(prefill_pairs=7), 0.7),
        (StepTiming(base_s=0, decode_s_per_sequence=0.1), work(decode_sequences=3), 0.3),
        (StepTiming(base_s=0, kv_read_s_per_token=0.01), work(decode_context=30), 0.3),
    ],
)
def test_each_term(timing: StepTiming, done: StepWork, seconds: float) -> None:
    assert timing.step_time(done) == pytest.approx(seconds)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", [field.name for field in fields(StepTiming)])
def test_a_step_that_takes_no_time_that_there_is(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=flag_of(name)):
        StepTiming(**{name: wrong})


def test_nothing_is_computed_at_a_rate_of_0() -> None:
    with pytest.raises(ValueError, match="--prefill-tokens-per-s"):
        StepTiming(prefill_tokens_per_s=0)


def test_chunks_attend_to_what_the_whole_prompt_does() -> None:
    whole, chunked = StepWork(), StepWork()
    whole.add_prefill(0, 1000)
    for start in range(0, 1000, 100):
        chunked.add_prefill(start, 100)
    assert chunked == whole
    assert whole.prefill_pairs == sum(range(1, 1001))


def test_decodes_add_up() -> None:
    done = StepWork()
    done.add_decode(10)
    done.add_decode(5)
    assert (done.decode_sequences, done.decode_context) == (2, 15)


def test_defaults_are_an_h100_with_an_8b_model() -> None:
    timing = StepTiming()
    prefill = StepWork()
    prefill.add_prefill(0, 8192)
    assert 20_000 < 8192 / timing.step_time(prefill) < 25_000
    decode = StepWork()
    for _ in range(32):
        decode.add_decode(4096)
    assert 0.010 < timing.step_time(decode) < 0.020
    parameters, flops, bandwidth = 8.03e9, 989e12, 3.35e12
    assert timing.prefill_tokens_per_s == pytest.approx(0.4 * flops / (2 * parameters), rel=0.05)
    assert timing.base_s == pytest.approx(2 * parameters / (0.8 * bandwidth), rel=0.05)
    assert timing.attention_s_per_pair == pytest.approx(4 * 32 * 128 * 32 / 500e12, rel=0.05)
    assert timing.kv_read_s_per_token == pytest.approx(2 * 8 * 128 * 32 * 2 / (0.8 * bandwidth), rel=0.05)
