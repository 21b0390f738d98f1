"""Who could take a request, as workers come, go and change."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest

from engines.description import EngineDescription, EventSource, Model
from engines.problems import (
    BAD_ENDPOINT,
    EVENTS_OFF,
    FOREIGN_ENDPOINT,
    NO_BLOCK_SIZE,
    NO_EVENT_SOURCES,
    NO_REPLAY,
    NOT_AN_ENGINE,
    OLD_EVENTS,
)
from indexer.types import WorkerRank
from router.http.pool import Pool
from router.scheduling.candidates import Candidates
from router.split.pairing import counterparts
from router.workers.fleet import ContextLengths, Fleet
from router.workers.spec import parse_worker
from router.workers.worker import ASSUMED_BLOCK_SIZE, LOOPS, Worker

BASE, ADAPTER = Model("m"), Model("adapter", parent="m")


def worker(
    name: str,
    *models: Model,
    dp_size: int = 1,
    block_size: int | None = None,
    keys: str = "",
    sources: tuple[EventSource, ...] = (),
    problems: tuple[str, ...] = (),
) -> Worker:
    spec = parse_worker(f"http://{name}:8000,name={name}{keys}")
    made = Worker(spec, Pool(spec.url, 1.0))
    made.description = EngineDescription(
        "vllm", models=models, dp_size=dp_size, block_size=block_size, event_sources=sources, problems=problems
    )
    return made


def fleet(*workers: Worker) -> Fleet:
    made = Fleet(workers)
    for each in workers:
        made.mark_up(each)
    return made


def test_what_no_worker_can_take_now_one_may_take_later() -> None:
    one, other, decode = worker("a", BASE), worker("b", Model("n")), worker("d", BASE, keys=",role=decode")
    unknown = Worker(parse_worker("http://x:1,name=x"), Pool("http://x:1", 1.0))
    found = fleet(one, other)
    assert not any(found.may_come_back(name, (), alone=False) for name in ("m", "n", None))
    found.mark_down(one, "gone")
    assert [found.may_come_back(name, (), alone=True) for name in ("m", "n", None)] == [True, False, True]
    assert not found.may_come_back("m", {"a"}, alone=False), "it cannot take this one"
    found.drain(one, True)
    assert not found.may_come_back("m", (), alone=False), "it leaves"
    found.add(decode)
    assert [found.may_come_back("m", (), alone=alone) for alone in (False, True)] == [True, False]
    found.add(unknown)
    assert found.may_come_back("z", (), alone=True), "nobody knows yet what it serves"
    assert Fleet([]).may_come_back("m", (), alone=True), "who comes first may serve anything"


def names(found: Candidates) -> list[str]:
    return [f"{rank}/{size}" for rank, size in zip(found.ranks, found.block_sizes.tolist(), strict=True)]


def test_candidates_are_ranks_in_order_each_with_its_block_size() -> None:
    found = fleet(worker("b", BASE, block_size=32), worker("a", BASE, dp_size=2))
    assert names(found.candidates("m")) == ["a#0/16", "a#1/16", "b#0/32"]
    assert names(found.candidates(None)) == names(found.candidates("m"))
    assert names(found.candidates("m", {"a"})) == ["b#0/32"]
    assert names(found.candidates("m", {"a", "b"})) == []
    assert found.block_sizes == {ASSUMED_BLOCK_SIZE, 32}


def test_those_that_cannot_serve_it_do_not_count_when_all_others_keep_failing() -> None:
    """A first try may go to any worker that could serve the request."""
    one, two = worker("a", BASE), worker("b", BASE)
    found = fleet(one, two)
    found.trip(one, "it fails", 0.0)
    assert names(found.candidates("m", unfit=frozenset({"b"}))) == ["a#0/16"]
    assert names(found.candidates("m", {"b"})) == [], "not a first try"


def test_only_those_that_serve_the_model() -> None:
    found = fleet(worker("a", BASE, ADAPTER), worker("b", BASE), worker("c", Model("n")), worker("d"))
    assert names(found.candidates("m")) == ["a#0/16", "b#0/16", "d#0/16"]
    assert names(found.candidates("adapter")) == ["a#0/16", "d#0/16"]
    assert names(found.candidates("never heard of")) == ["d#0/16"]


def test_the_same_candidates_are_the_same_object_until_a_worker_goes_or_comes() -> None:
    """What is known of a set of ranks is remembered by its identity."""
    one, two = worker("a", BASE), worker("b", BASE)
    found = fleet(one, two)
    before = found.candidates("m")
    assert found.candidates("m") is before
    without = found.candidates("m", {"a"})
    assert names(without) == ["b#0/16"]
    assert found.candidates("m", frozenset(["a"])) is without
    assert found.candidates("m", {"b"}) is not without
    assert found.candidates("m") is before
    found.mark_down(two, "gone")
    assert names(found.candidates("m")) == ["a#0/16"]
    assert names(before) == ["a#0/16", "b#0/16"]


def test_the_urls_are_the_same_object_until_a_worker_goes_or_comes() -> None:
    one, other = worker("a"), worker("b")
    found = fleet(one)
    urls = found.urls
    found.mark_down(one, "gone")
    assert found.urls is urls
    assert urls == {"http://a:8000"}
    found.add(other)
    assert found.urls == {"http://a:8000", "http://b:8000"}
    found.remove(one)
    assert found.urls == {"http://b:8000"}


def test_who_excludes_nobody_that_could_serve_waits_with_those_who_exclude_nobody() -> None:
    """When hundreds of workers die at once, the requests of each exclude another one, and each pass of the queue looks
    at all that have other candidates."""
    dead = [worker(f"dead{number}", BASE) for number in range(300)]
    broken, alive = worker("broken", BASE), worker("alive", BASE)
    found = fleet(broken, alive, *dead)
    for each in dead:
        found.mark_down(each, "gone")
    found.trip(broken, "it fails", 0.0)
    everybody = found.candidates("m")
    assert names(everybody) == ["alive#0/16"]
    for each in (broken, *dead):
        assert found.candidates("m", {each.id}) is everybody
    assert names(found.candidates("m", {"alive", "dead1"})) == []
    assert found.candidates("m", {"alive"}) is found.candidates("m", {"alive", "dead1"})
    found.mark_up(dead[1])
    assert names(found.candidates("m", {"dead1"})) == ["alive#0/16"], "excluded still, though it is back"
    assert names(found.candidates("m")) == ["alive#0/16", "dead1#0/16"]


def test_a_further_try_goes_to_nobody_that_keeps_failing_even_if_it_excludes_others() -> None:
    one, two = worker("a", BASE), worker("b", BASE)
    found = fleet(one, two)
    found.mark_down(one, "gone")
    found.trip(two, "it fails", 0.0)
    assert names(found.candidates("m")) == ["b#0/16"], "a first try"
    assert names(found.candidates("m", {"a"})) == []
    assert names(found.candidates("m")) == ["b#0/16"]


def test_a_worker_that_is_down_already_changes_nothing_for_others() -> None:
    """A thousand of its requests may fail one after the other, each of which finds it down."""
    one, two = worker("a", BASE), worker("b", BASE)
    found = fleet(one, two)
    found.mark_down(two, "refused")
    candidates = found.candidates("m")
    found.mark_down(two, "reset")
    assert (two.up, two.trouble) == (False, "reset")
    assert found.candidates("m") is candidates, "who is held for them stays in one lane"


def test_candidates_of_one_worker() -> None:
    one, two = worker("a", BASE, dp_size=2, block_size=32), worker("b", BASE)
    found = fleet(one, two)
    assert names(found.candidates_of(one, "m")) == ["a#0/32", "a#1/32"]
    assert found.candidates_of(one, "m") is found.candidates_of(one, None)
    assert names(found.candidates_of(one, "m", {"b"})) == ["a#0/32", "a#1/32"]
    for model, exclude in (("n", ()), ("m", {"a"})):
        assert names(found.candidates_of(one, model, exclude)) == []
    found.mark_down(one, "restarts")
    assert names(found.candidates_of(one, "m")) == []
    one.description = EngineDescription("vllm", models=(BASE,), block_size=64)
    found.mark_up(one)
    assert names(found.candidates_of(one, "m")) == ["a#0/64"]


def test_nobody_before_the_first_answer_and_after_the_last() -> None:
    one, unknown = worker("a", BASE), Worker(parse_worker("http://x:1,name=x"), Pool("http://x:1", 1.0))
    assert Fleet([unknown]).block_sizes == frozenset()
    found = Fleet([one, unknown])
    assert (names(found.candidates("m")), found.up) == ([], [])
    found.mark_up(one)
    assert names(found.candidates("m")) == ["a#0/16"]
    found.mark_down(one, "gone")
    assert (names(found.candidates("m")), found.up, found.block_sizes) == ([], [], frozenset({16}))
    assert (one.trouble, repr(one)) == ("gone", "<Worker a down: gone>")
    found.mark_up(one)
    assert names(found.candidates("m")) == ["a#0/16"]
    assert (one.trouble, repr(one)) == ("", "<Worker a up>")


def test_a_worker_that_comes_back_different_is_seen_as_it_is_now() -> None:
    one = worker("a", BASE)
    found = fleet(one)
    assert names(found.candidates("m")) == ["a#0/16"]
    found.mark_down(one, "restarts")
    one.description = EngineDescription("vllm", models=(Model("n"),), dp_size=2, block_size=64)
    found.mark_up(one)
    assert names(found.candidates("m")) == []
    assert names(found.candidates("n")) == ["a#0/64", "a#1/64"]


def test_names_from_outside_do_not_pile_up() -> None:
    """Their requests wait in one lane: each lane costs every pass of the queue."""
    found = fleet(worker("a", BASE), worker("b"), worker("c"))
    others, one_less = found.candidates("guess"), found.candidates("guess", {"b"})
    assert (names(others), names(one_less)) == (["b#0/16", "c#0/16"], ["c#0/16"])
    for number in range(100):
        assert found.candidates(f"guess {number}") is others
        assert found.candidates(f"guess {number}", {"b"}) is one_less
    assert names(found.candidates("m")) == ["a#0/16", "b#0/16", "c#0/16"]
    assert not found.knows("guess")


def test_going_down_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    one = worker("a", BASE)
    found = Fleet([one])
    found.mark_down(one, "was never up")
    found.mark_up(one)
    found.mark_down(one, "first")
    found.mark_down(one, "second")
    assert one.trouble == "second"
    assert [(record.levelno, record.__dict__["fields"]) for record in caplog.records] == [
        (logging.WARNING, {"worker": "a", "trouble": "first"})
    ]


@pytest.mark.parametrize(
    ("keys", "found", "size"), [("", None, 16), ("", 32, 32), (",block_size=64", 32, 64), (",block_size=64", None, 64)]
)
def test_a_block_size_is_stated_or_found_or_assumed(keys: str, found: int | None, size: int) -> None:
    assert worker("a", keys=keys, block_size=found).block_size == size


@pytest.mark.parametrize(
    ("keys", "found", "told"),
    [(",block_size=64", 32, 1), (",block_size=64", 64, 0), (",block_size=64", None, 0), ("", 32, 0)],
)
def test_a_block_size_that_is_stated_wrongly_is_a_problem(keys: str, found: int | None, told: int) -> None:
    problems = worker("a", keys=keys, block_size=found).problems
    assert len(problems) == told
    assert all("64 tokens is stated, but the engine tells 32" in problem for problem in problems)


@pytest.mark.parametrize(
    ("keys", "problem", "left"),
    [
        ("", NO_EVENT_SOURCES, True),
        (",events=tcp://a:1", NO_EVENT_SOURCES, False),
        (",events=tcp://a:1", EVENTS_OFF, False),
        (",events=tcp://a:1", BAD_ENDPOINT, False),
        (",events=tcp://a:1", FOREIGN_ENDPOINT, False),
        (",events=tcp://a:1", OLD_EVENTS, True),
        (",events=tcp://a:1", NO_REPLAY, True),
        (",replay=tcp://a:1", NO_REPLAY, False),
        (",replay=tcp://a:1", NO_EVENT_SOURCES, True),
        (",block_size=64", NO_BLOCK_SIZE, False),
        (",events=tcp://a:1", NO_BLOCK_SIZE, True),
        (",block_size=64", NOT_AN_ENGINE, True),
        (",block_size=64,events=tcp://a:1", NOT_AN_ENGINE, False),
    ],
)
def test_what_the_operator_states_is_no_problem(keys: str, problem: str, left: bool) -> None:
    one = worker("a", keys=keys, problems=(problem,))
    assert one.problems == ((problem,) if left else ())


@pytest.mark.parametrize(
    ("keys", "problem", "left"),
    [
        *[("", problem, False) for problem in (NO_EVENT_SOURCES, EVENTS_OFF, BAD_ENDPOINT, FOREIGN_ENDPOINT)],
        ("", NO_REPLAY, False),
        ("", OLD_EVENTS, False),
        ("", NO_BLOCK_SIZE, True),
        ("", NOT_AN_ENGINE, True),
        (",block_size=64", NOT_AN_ENGINE, False),
    ],
)
def test_where_an_engine_publishes_is_no_matter_if_nobody_here_reads_it(keys: str, problem: str, left: bool) -> None:
    spec = parse_worker(f"http://a:8000{keys}")
    one = Worker(spec, Pool(spec.url, 1.0), events_read=False)
    one.description = EngineDescription("vllm", problems=(problem,))
    assert one.problems == ((problem,) if left else ())


def test_an_endpoint_that_one_rank_of_several_tells_wrongly_stays_a_problem() -> None:
    sources = (EventSource(0, "tcp://a:1"),)
    assert worker("a", keys=",events=tcp://a:1", problems=(BAD_ENDPOINT,), sources=sources).problems == (BAD_ENDPOINT,)


def test_events_are_stated_or_found() -> None:
    assert not worker("a").has_events
    assert worker("a", keys=",events=tcp://a:1").has_events
    assert worker("a", sources=(EventSource(0, "tcp://a:1"),)).has_events


def test_a_worker_that_was_not_described_yet() -> None:
    spec = parse_worker("http://a:8000")
    one = Worker(spec, Pool(spec.url, 1.0))
    assert one.ranks == [WorkerRank("a:8000", 0)]
    assert (one.block_size, one.models, one.has_events) == (ASSUMED_BLOCK_SIZE, (), False)
    assert one.serves("anything")
    assert repr(one) == "<Worker a:8000 down: has not answered yet>"


def test_what_is_known_and_what_may_be_served() -> None:
    one, two = worker("a", BASE), worker("b", Model("n"))
    found = Fleet([one, two])
    found.mark_up(one)
    assert [found.knows(name) for name in ("m", "n", "x")] == [True, True, False]
    assert [found.may_serve(name) for name in ("m", "n", "x")] == [True, True, False]
    found.redescribe(two, EngineDescription("unknown"))
    assert [found.knows(name) for name in ("m", "n", "x")] == [True, False, False]
    assert [found.may_serve(name) for name in ("m", "n", "x")] == [True, True, True]


@pytest.mark.parametrize(
    ("models", "one"),
    [
        ([BASE], True),
        ([BASE, ADAPTER], True),
        ([Model("m", root="/m"), Model("alias", root="/m")], True),
        ([Model("m", root="/here/m"), Model("m", root="/there/m")], True),
        ([BASE, Model("n")], False),
        ([Model("m", root="/m"), Model("n", root="/n")], False),
    ],
)
def test_one_model_by_whatever_names(models: list[Model], one: bool) -> None:
    unknown = Worker(parse_worker("http://z:8000"), Pool("http://z:8000", 1.0))
    assert Fleet([unknown, *(worker(f"w{n}", model) for n, model in enumerate(models))]).has_one_model is one


def test_models_are_the_union_of_those_that_are_up_each_with_its_first_worker() -> None:
    one, two, down = worker("a", BASE), worker("b", BASE, ADAPTER), worker("c", Model("n"))
    found = fleet(one, two)
    found.workers["c"] = down
    assert found.models() == {"m": (one, BASE), "adapter": (two, ADAPTER)}


def test_only_an_adapter_has_a_lora_name() -> None:
    found = fleet(worker("a", BASE, ADAPTER))
    assert [found.lora_name(name) for name in ("adapter", "m", "x", None)] == ["adapter", None, None, None]


def test_sglangs_name_for_an_adapter_is_that_adapters() -> None:
    found = fleet(worker("a", BASE, ADAPTER, Model("m:adapter", parent="m")))
    assert found.lora_name("m:adapter") == "adapter"
    assert found.base_model("m:adapter") == BASE


def test_one_model_under_several_names_need_not_be_named() -> None:
    """vLLM's --served-model-name takes several."""
    names = Model("m", root="/m"), Model("alias", root="/m")
    assert fleet(worker("a", *names)).base_model(None) == names[0]
    assert fleet(worker("a", *names), worker("b", Model("n", root="/n"))).base_model(None) is None
    assert fleet().base_model(None) is None


def test_what_a_worker_that_is_down_served_is_still_known() -> None:
    one, two = worker("a", BASE, ADAPTER), worker("b", Model("n"))
    found = fleet(one, two)
    assert [found.base_of_down(name) for name in ("m", "adapter", None)] == [None, None, None]
    found.mark_down(one, "gone")
    assert [found.base_of_down(name) for name in ("m", "adapter", "n", None)] == [BASE, BASE, None, None]
    assert [found.base_model(name) for name in ("m", "adapter")] == [None, None]
    assert [found.lora_name(name) for name in ("adapter", "m")] == ["adapter", None]
    alone = fleet(worker("a", BASE))
    alone.mark_down(alone.workers["a"], "gone")
    assert alone.base_of_down(None) == BASE


def test_all_names_of_a_model_are_one_to_prompts() -> None:
    names = Model("m", root="/m"), Model("alias", root="/m"), ADAPTER
    found = fleet(worker("a", *names), worker("b", Model("alias", root="/elsewhere/m")))
    asked = ("m", "alias", None, "adapter", "x")
    assert [found.prompt_name(name) for name in asked] == ["alias", "alias", "alias", "adapter", "x"]
    found = fleet(worker("a", *names), worker("b", Model("n", root="/n")))
    assert [found.prompt_name(name) for name in ("m", "alias", "n", None)] == ["alias", "alias", "n", None]
    assert fleet().prompt_name("m") == "m"


def test_the_name_that_stands_for_a_model_stays_when_the_worker_that_has_it_is_down() -> None:
    """What other workers were sent is still there."""
    one = worker("a", Model("m", root="/m"), Model("alias", root="/m"))
    found = fleet(one, worker("b", Model("m", root="/m")))
    found.mark_down(one, "test")
    assert [found.prompt_name(name) for name in ("m", "alias", None)] == ["alias"] * 3


def test_context_lengths_are_known_of_those_that_are_up() -> None:
    small, large, untold = (
        worker("a", Model("m", max_model_len=10)),
        worker("b", Model("m", max_model_len=20)),
        worker("c", BASE),
    )
    found = fleet(small, large)
    limits = found.context_lengths("m")
    assert (limits.least, limits.most) == (10, 20)
    assert [limits.under(tokens) for tokens in (10, 11, 21)] == [set(), {"a"}, {"a", "b"}]
    found.add(untold)
    found.mark_up(untold)
    assert found.context_lengths("m") == ContextLengths({"a": 10, "b": 20}, 10, None)
    found.mark_down(small, "gone")
    assert found.context_lengths("m") == ContextLengths({"b": 20}, 20, None)
    assert found.context_lengths("other") == ContextLengths({}, None, None)


def test_a_worker_that_cuts_prompts_has_no_context_that_is_too_short() -> None:
    cutting, other = worker("a", Model("m", max_model_len=10)), worker("b", Model("m", max_model_len=20))
    assert cutting.description is not None
    cutting.description = msgspec.structs.replace(cutting.description, cuts_prompts=True)
    assert fleet(cutting).context_lengths("m") == ContextLengths({}, None, None)
    assert fleet(cutting, other).context_lengths("m") == ContextLengths({"b": 20}, 20, None)


# -- a fleet that changes


def test_workers_come_and_go() -> None:
    one, two = worker("a", BASE), worker("b", BASE, ADAPTER)
    found = fleet(one)
    assert names(found.candidates("m")) == ["a#0/16"]
    found.add(two)
    assert names(found.candidates("m")) == ["a#0/16"], "it was not looked at yet"
    found.mark_up(two)
    assert names(found.candidates("m")) == ["a#0/16", "b#0/16"]
    found.remove(one)
    assert (names(found.candidates("m")), list(found.workers)) == (["b#0/16"], ["b"])
    assert names(found.candidates_of(one, "m")) == []
    found.remove(two)
    assert [found.may_serve("m"), found.knows("adapter"), *found.models()] == [True, False], "who comes next may be any"


def test_a_draining_worker_gets_nothing_new() -> None:
    one, two = worker("a", BASE, dp_size=2, block_size=32), worker("b", BASE)
    found = fleet(one, two)
    found.drain(one, True)
    assert (one.state, one.up, repr(one)) == ("draining", True, "<Worker a draining>")
    assert names(found.candidates("m")) == names(found.candidates("m", {"a"})) == ["b#0/16"]
    assert (names(found.candidates_of(one, "m")), found.up) == ([], [two])
    found.mark_down(one, "gone")
    assert (one.state, repr(one)) == ("draining", "<Worker a draining: gone>")
    found.drain(one, False)
    assert (one.state, names(found.candidates("m"))) == ("down", ["b#0/16"])
    found.mark_up(one)
    assert names(found.candidates_of(one, "m")) == ["a#0/32", "a#1/32"]


def test_what_is_stated_anew_counts_at_once() -> None:
    one = worker("a", BASE)
    found = fleet(one)
    assert names(found.candidates("m")) == ["a#0/16"]
    found.restate(one, parse_worker("http://a:8000,name=a,role=decode,block_size=64"))
    assert (names(found.candidates("m")), found.block_sizes) == ([], frozenset({64}))


def pairs(found: Fleet, prefill: Worker, exclude: tuple[str, ...] = ()) -> list[str]:
    """To whom it may hand over."""
    split = found.split_of(prefill, "m", exclude)
    return names(split.decodes[0]) if split else []


def test_a_draining_worker_hands_over_what_it_has_begun() -> None:
    p, d, both, other = (
        worker("p", BASE, keys=",role=prefill,connector=nixl"),
        worker("d", BASE, keys=",role=decode,connector=nixl"),
        worker("b", BASE, keys=",connector=nixl"),
        worker("n", Model("n"), keys=",role=decode,connector=nixl"),
    )
    found = fleet(p, d, both, other)
    assert found.candidates("m").split is not None
    found.drain(p, True)
    assert found.candidates("m").split is None
    assert pairs(found, p) == ["b#0/16", "d#0/16"]
    assert pairs(found, p, ("b",)) == ["d#0/16"]
    found.drain(d, True)
    assert pairs(found, p) == ["b#0/16"]
    assert pairs(found, p, ("b",)) == ["d#0/16"], "rather than nobody"
    found.mark_down(d, "gone")
    assert pairs(found, p, ("b",)) == []
    found.mark_down(p, "gone")
    assert pairs(found, p) == [], "and its KV with it"


def test_a_worker_that_leads_back_is_warned_of_once_and_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    a = worker("a", BASE)
    found = fleet(a)
    assert not a.loops(0.0)
    for now in (0.0, 200.0, 400.0):
        found.loop_found(a, now)
    assert a.loops(700.0)
    assert caplog.messages == [LOOPS]
    assert not a.loops(701.0)
    found.loop_found(a, 701.0)
    assert caplog.messages == [LOOPS] * 2


def test_a_worker_that_is_back_is_not_taken_to_leave_out_zeros_before_it_has_told_a_number() -> None:
    """It may have been started without the flag that makes it tell them: zeros from then on would be taken for drift of
    the index."""
    one = worker("a", BASE)
    found = fleet(one)
    assert [one.reported(cached) for cached in (None, 8, None)] == [None, 8, 0]
    found.mark_down(one, "it restarts")
    found.mark_up(one)
    assert [one.reported(cached) for cached in (None, 8, None)] == [None, 8, 0]


def test_models_of_the_same_workers_have_the_same_candidates() -> None:
    """Hundreds of adapters on hundreds of workers: each change of the fleet makes them anew, for each name."""
    both, one = worker("a", BASE, ADAPTER), worker("b", BASE, ADAPTER, Model("own"))
    made = fleet(both, one)
    assert made.candidates("m") is made.candidates("adapter") is made.candidates(None)
    assert names(made.candidates("own")) == ["b#0/16"]
    made.mark_down(both, "test")
    assert made.candidates("m") is made.candidates("adapter") is made.candidates("own")
    assert names(made.candidates("m")) == ["b#0/16"]


def test_the_names_of_a_workers_models_are_put_together_once_for_each_description() -> None:
    one = worker("a", BASE, ADAPTER)
    made = fleet(one)
    assert one.model_names is one.model_names == {"m", "adapter"}
    assert (one.serves("adapter"), one.serves("other")) == (True, False)
    made.redescribe(one, EngineDescription("vllm", models=(BASE, Model("other", parent="m"))))
    assert (one.serves("adapter"), one.serves("other")) == (False, True)
    assert (made.may_serve("adapter"), made.may_serve("other")) == (False, True)


class Looked(tuple[Model, ...]):
    """Models that count how often all of them are looked through."""

    looks = 0

    def __iter__(self) -> Iterator[Model]:
        self.looks += 1
        return super().__iter__()


def test_adapters_are_not_looked_through_again_after_each_change_of_the_fleet() -> None:
    """Of hundreds of adapters on hundreds of workers it took 40 ms, with the first request after each change."""
    looked = Looked((BASE, Model("alias", root="m"), ADAPTER))
    one = worker("b")
    one.description = EngineDescription("vllm", models=looked, role="decode", connector="nixl")
    made = fleet(worker("a", *looked), one, worker("c", BASE))

    def asked() -> tuple[object, ...]:
        told = made.prompt_name("m"), made.prompt_name("alias"), made.prompt_name("adapter"), made.has_one_model
        return *told, made.base_model("adapter"), sorted(made.models()), counterparts(made.up)

    before = asked()
    assert before[:6] == ("alias", "alias", "adapter", True, BASE, ["adapter", "alias", "m"])
    looks = looked.looks
    made.drain(made.workers["c"], True)
    assert asked() == before
    assert looked.looks == looks


def test_models_are_looked_through_once_until_a_worker_changes() -> None:
    """Of hundreds of workers with hundreds of adapters each it takes milliseconds, and requests ask each time: those
    with a name that nobody serves, and all on an engine's own paths."""
    one = worker("a", BASE, ADAPTER)
    made = fleet(one)

    def asked() -> tuple[bool, ...]:
        return made.has_one_model, *(made.names_adapter(name, "vllm") for name in ("adapter", "m", "x", None))

    before = asked()
    assert before == (True, True, False, False, False)
    described = EngineDescription("vllm", models=(BASE, Model("x", parent="m"), Model("other")))
    one.description = described
    assert asked() == before, "it was not looked at again"
    made.redescribe(one, described)
    assert asked() == (False, False, False, True, False)
    assert not made.names_adapter("x", "sglang")
