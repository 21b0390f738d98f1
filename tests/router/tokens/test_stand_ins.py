"""What begins alike is stood for alike, in whichever form it is said."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import pack_tokens
from router.tokens.stand_ins import MEDIA_TOKENS, MOST_MEDIA, MOST_VALUES, stand_ins

SYSTEM = "You are a careful assistant, and say so each time. "
TEXT = "What is in this picture, and who took it? "


def common(one: list[object], other: list[object]) -> int:
    """Leading tokens that both have."""
    pairs = zip(stand_ins(one).tolist(), stand_ins(other).tolist(), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(stand_ins(one)), len(stand_ins(other))))


def test_they_are_hashed_by_what_is_compiled_for_tokens() -> None:
    # To the compiler an array that cannot be written to is of another type: the first such request would wait for it.
    typeof: Callable[[object], object] = numba.typeof
    assert typeof(stand_ins(["abcdefgh"])) == typeof(pack_tokens([1, 2]))


def user(content: object, **more: object) -> dict[str, object]:
    return {"role": "user", "content": content, **more}


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


@given(st.text(max_size=60), st.text(max_size=60))
def test_a_text_begins_with_its_beginning(begin: str, more: str) -> None:
    whole = len(begin.encode("utf-8", "surrogatepass")) // 4
    assert len(stand_ins([begin])) == whole
    assert common([begin], [begin + more]) == whole


def test_four_bytes_are_a_token() -> None:
    assert stand_ins(["abcdefgh"]).tobytes() == b"abcdefgh"
    assert stand_ins(["abcdefg"]).tobytes() == b"abcd"
    assert stand_ins(["\ud800x"]).dtype == np.uint32
    assert len(stand_ins([])) == len(stand_ins([None, 5, True, 1.5, {}])) == 0


def test_a_conversation_begins_with_what_was_said_before() -> None:
    first = [{"role": "system", "content": SYSTEM}, user(TEXT)]
    grown = [*first, {"role": "assistant", "content": "A cat."}, user("Which one?")]
    assert common([first], [grown]) == len(stand_ins([first]))
    other = [{"role": "system", "content": SYSTEM}, user("Something else.")]
    assert len(SYSTEM) // 4 <= common([first], [other]) < len(stand_ins([first]))


@pytest.mark.parametrize(
    "same",
    [
        user([{"type": "text", "text": TEXT}]),
        user([{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]),
        user([{"type": "input_text", "text": TEXT}], type="message", id="msg_1", status="completed"),
        user([{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]),
    ],
)
def test_what_is_rendered_alike_is_alike(same: dict[str, object]) -> None:
    assert stand_ins([[same]]).tolist() == stand_ins([[user(TEXT)]]).tolist()


@pytest.mark.parametrize("system", [lambda head: [{"type": "text", "text": head}, SYSTEM], lambda head: head + SYSTEM])
def test_a_line_that_the_model_is_not_shown_stands_for_nothing(system: Callable[[str], object]) -> None:
    """Claude Code's is another with each request, and stands before all else."""
    said = [system(f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};\n") for nonce in ("36ee5", "0aaa9")]
    one, other = ([each, [user(TEXT)]] for each in said)
    assert stand_ins(one).tolist() == stand_ins(other).tolist() == stand_ins([SYSTEM, [user(TEXT)]]).tolist()
    assert stand_ins(one, billed=True).tolist() != stand_ins(other, billed=True).tolist()


def test_an_image_counts_for_many_tokens_however_long_its_url_is() -> None:
    short, long = (len(stand_ins([[user([image(url)])]])) for url in ("http://x/1.png", "data:," + "A" * 100_000))
    assert short == long == MEDIA_TOKENS + len("user") // 4


def test_what_is_a_few_bytes_to_a_client_does_not_become_much_here() -> None:
    """Kilobytes for each part would be gigabytes for a body of megabytes."""
    few, many = [user([image("x")] * MOST_MEDIA)], [user([image("x")] * 10 * MOST_MEDIA)]
    assert len(stand_ins([many])) <= 2 * len(stand_ins([few]))
    assert common([few], [many]) == len(stand_ins([few]))
    other = [user([image("x")] * 2 * MOST_MEDIA + [image("y")] * 8 * MOST_MEDIA)]
    assert len(stand_ins([few])) < common([many], [other]) < len(stand_ins([many]))


def test_another_image_is_another_prompt_from_there_on() -> None:
    before = {"role": "system", "content": SYSTEM + "." * (-len(SYSTEM + "systemuser") % 4)}
    first, second = ([before, user([image(url), {"type": "text", "text": TEXT}])] for url in ("data:,a", "data:,b"))
    assert common([first], [first]) == len(stand_ins([first]))
    assert common([first], [second]) == len(stand_ins([[before, user("")]]))


@pytest.mark.parametrize(
    "kind", ["image", "input_image", "image_url", "input_audio", "video_url", "file", "document", "prompt_embeds"]
)
def test_whatever_is_no_text_is_taken_whole(kind: str) -> None:
    part = {"type": kind, "source": {"data": "x" * 5000}}
    assert len(stand_ins([[part]])) == MEDIA_TOKENS
    assert stand_ins([[part]]).tolist() != stand_ins([[{**part, "detail": "low"}]]).tolist()


@pytest.mark.parametrize("kind", ["image_generation", "file_search"])
def test_a_tool_for_media_is_no_medium(kind: str) -> None:
    """Engines show the model functions alone."""
    assert len(stand_ins([[{"type": kind, "output_format": "jpeg"}]])) == 1


def test_what_a_tool_is_called_with_is_text() -> None:
    """Engines make JSON of it: names and numbers too, and nothing in it is a medium."""
    calls = [{"id": "7", "block": {"type": "image", "at": 9}}, {"id": "8", "block": {"type": "image", "at": 9}}]
    one, other = (stand_ins([{"type": "tool_use", "id": "t", "name": "put", "input": call}]) for call in calls)
    assert one.tolist() != other.tolist()
    assert one.tobytes().startswith(b'put{"id":"7"')
    assert len(one) < MEDIA_TOKENS


def test_what_signs_a_thought_is_not_shown() -> None:
    thought = {"type": "thinking", "thinking": TEXT}
    signed = {**thought, "signature": "EqQBCgIYAhIM" * 40}
    assert stand_ins([[signed]]).tolist() == stand_ins([[thought]]).tolist()


@pytest.mark.parametrize("marked", [{"cache_control": {"type": "ephemeral"}}, {"id": "ig_1", "status": "completed"}])
def test_an_image_is_the_same_however_it_is_marked(marked: dict[str, object]) -> None:
    """Clients of Anthropic's mark the last part of all, which is not the last one any more in the next turn."""
    part = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    assert stand_ins([[{**part, **marked}]]).tolist() == stand_ins([[part]]).tolist()


def test_an_image_with_a_uuid_is_what_that_names() -> None:
    """vLLM needs its bytes once, and takes an image for the same where they differ."""
    sent = {"type": "image_url", "image_url": {"url": "data:,a"}, "uuid": "cat"}
    again = {"type": "image_url", "image_url": None, "uuid": "cat"}
    other = {**again, "uuid": "dog"}
    assert stand_ins([[sent]]).tolist() == stand_ins([[again]]).tolist() != stand_ins([[other]]).tolist()


def test_token_ids_stand_for_themselves() -> None:
    assert stand_ins([np.array([5, 6, 7], np.uint32)]).tolist() == [5, 6, 7]


def test_depth_is_no_matter() -> None:
    deep: object = TEXT
    for _ in range(100_000):
        deep = [deep]
    assert stand_ins([deep]).tolist() == stand_ins([TEXT]).tolist()


@pytest.mark.parametrize(
    "many",
    [
        ["more"] * (MOST_VALUES + 9),
        {f"name {number}": "more" for number in range(MOST_VALUES + 9)},
        [[], {"role": "user", "content": ["more"] * MOST_VALUES}, "more"],
        [["more", {"a": "more", "b": "more"}]] * (MOST_VALUES // 2),
    ],
)
def test_of_more_values_than_there_ever_are_the_first_are_looked_at(many: object) -> None:
    """Each takes its time, in which no other client is served."""
    found = stand_ins([SYSTEM, many, "behind"])
    first = np.frombuffer(SYSTEM.encode(), np.uint32, len(SYSTEM) // 4).tolist()
    assert found.tolist()[: len(first)] == first
    assert MOST_VALUES // 4 < len(found) <= len(first) + MOST_VALUES + 2


def test_an_image_nested_deeper_than_can_be_written_is_an_image() -> None:
    nested: object = 1
    for _ in range(100_000):
        nested = [nested]
    assert len(stand_ins([{"type": "image", "source": nested}])) == MEDIA_TOKENS
