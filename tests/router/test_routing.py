"""What happens in which order when a request is routed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from engines.description import EngineDescription, EngineKind, Model
from engines.disaggregation.answer import Prefilled
from indexer.events import EventBatch, LoadReport, Stored, pack_hashes
from indexer.kv_indexer import KVIndexer, hash_prompt
from indexer.predicted import LIFE
from indexer.types import PLAIN, Tier, WorkerRank
from router.arms import Arm, ArmTally
from router.context import Prompt, RouterContext
from router.events.index_audit import IndexAudit
from router.http.messages import Response
from router.http.pool import Pool
from router.metrics.registry import Metrics
from router.outage import Outage
from router.proxy.failures import Failure
from router.proxy.legs import Leg, Pair
from router.proxy.outcome import Outcome
from router.retry_budget import RetryBudget
from router.routing import RequestRouting
from router.routing_options import RoutingOptions
from router.scheduling.admission import Admission
from router.scheduling.balance import LeastLoaded
from router.scheduling.decision import Decision
from router.scheduling.load import LoadBook
from router.scheduling.queue import Queue
from router.scheduling.scheduler import Scheduler
from router.split.bodies import SplitBodies
from router.workers.fleet import Fleet
from router.workers.spec import parse_worker
from router.workers.worker import Worker
from tests.router.scheduling.candidates import Scripted

RANK, BLOCK = WorkerRank("w", 0), 4
HASHES = hash_prompt(range(10), {BLOCK}, PLAIN)


def context() -> RouterContext:
    """Of one worker, at a time that stands still."""
    worker = Worker(parse_worker("http://127.0.0.1:9,name=w"), Pool("http://127.0.0.1:9", 1.0))
    worker.description = EngineDescription("vllm", models=(Model("m"),), block_size=BLOCK)
    fleet, book = Fleet([worker]), LoadBook()
    fleet.mark_up(worker)
    scheduler, indexer = Scheduler(LeastLoaded(), book, Scripted([])), KVIndexer()
    scheduler.watch(RANK, BLOCK)
    indexer.watch(RANK)
    queue = Queue(scheduler, Admission(), lambda: 0.0, lambda seconds, callback: None)
    return RouterContext(fleet, book, scheduler, queue, indexer, Metrics(), lambda: 0.0, RetryBudget(0.2, 0.0))


def blocks_held(made: RouterContext, prompt: Prompt) -> int:
    found = made.matches(prompt)
    return found[RANK].blocks if found and RANK in found else 0


def test_a_request_is_booked_before_it_is_sent_and_noted_after() -> None:
    made = context()
    seen: list[tuple[int, int, bool]] = []

    def look() -> tuple[int, int, bool]:
        """Requests booked, prompt tokens counted, whether the prompt's blocks are expected there."""
        counted = made.metrics.tallies.worker(RANK.worker_id).prompt_tokens
        return made.book.booked(RANK), counted, RANK in made.indexer.find_matches(HASHES)

    def send(routed: Leg | Pair | Response) -> None:
        assert isinstance(routed, Leg)
        seen.append(look())

    routing = RequestRouting(made, "m")
    routing.prompt = Prompt(10, HASHES)
    routing.route(frozenset(), send)
    assert seen == [(1, 0, False)]  # the worker does not wait for what only later requests need
    assert look() == (1, 10, True)


@pytest.mark.parametrize(("model", "seconds"), [("m", 0.0), ("lora", 10.0)])
def test_a_request_for_an_adapter_takes_its_slot_until_it_has_ended(model: str, seconds: float) -> None:
    made, legs = context(), list[Leg | Pair | Response]()
    worker = made.fleet.workers["w"]
    assert worker.description
    models = (Model("m"), Model("lora", parent="m"))
    made.fleet.redescribe(worker, replace(worker.description, models=models))
    made.book.on_report(LoadReport("w", 0, 1, -1, True, lora_total_slots=1), 0.0)
    RequestRouting(made, model).route(frozenset(), legs.append)
    (leg,) = legs
    assert isinstance(leg, Leg)
    candidates = made.fleet.candidates(model)
    assert made.book.adapters.waits(candidates, "another", 10.0).tolist() == [seconds]
    leg.reservation.release(1.0)
    assert made.book.adapters.waits(candidates, "another", 10.0).tolist() == [0.0]


@pytest.mark.parametrize("guessed", [False, True])
@pytest.mark.parametrize("has_events", [False, True])
def test_nothing_is_expected_of_a_worker_that_keeps_no_prefixes(guessed: bool, has_events: bool) -> None:
    made, prompt = context(), Prompt(10, HASHES, guessed=guessed)
    if has_events:
        made.indexer.on_batch(EventBatch("w", 0, 1, 0, [Stored(Tier.GPU, pack_hashes([1]))]))
    worker = made.fleet.workers["w"]
    assert worker.description
    made.fleet.redescribe(worker, replace(worker.description, keeps_prefixes=False))
    routing = RequestRouting(made, "m")
    routing.prompt = prompt
    routing.route(frozenset(), list[Leg | Pair | Response]().append)
    assert RANK not in (made.matches(prompt) or {})


@pytest.mark.parametrize("guessed", [False, True])
def test_what_no_events_will_tell_of_is_expected_for_longer_and_never_audited(guessed: bool) -> None:
    indexer, audited = KVIndexer(assumed_ttl=60.0), list[object]()
    audit = IndexAudit(indexer, audited.append, has_store=False)
    made = context()._replace(indexer=indexer, audit=audit)
    indexer.watch(RANK)
    indexer.on_batch(EventBatch("w", 0, 1, 0, [Stored(Tier.GPU, pack_hashes([1]))]))
    routing = RequestRouting(made, "m")
    routing.prompt = Prompt(10, HASHES, guessed=guessed)
    legs = list[Leg | Pair | Response]()
    routing.route(frozenset(), legs.append)
    assert RANK in (made.matches(routing.prompt) or {})
    indexer.expire(3 * LIFE)
    indexer.expire(5 * LIFE)
    assert (RANK in (made.matches(routing.prompt) or {})) == guessed
    assert indexer.index.entries() == 1, "what its events say"
    (leg,) = legs
    assert isinstance(leg, Leg)
    routing.finished(Outcome(leg, 200, "complete", 0.1, 0.2, 10, 8, None))  # far more than was expected
    audit.tick(10.0)
    assert (audit.status(RANK) is None) == guessed


def test_an_engine_that_leaves_out_a_zero_is_audited_all_the_same() -> None:
    """An engine that lost all that it held tells nothing any more, if it is SGLang to 0.5.18."""
    indexer = KVIndexer()
    audit = IndexAudit(indexer, lambda _: None, has_store=False)
    clock = itertools.count(10)
    made = context()._replace(indexer=indexer, audit=audit, clock=lambda: float(next(clock)))
    indexer.watch(RANK)
    indexer.on_batch(EventBatch("w", 0, 1, 0, [Stored(Tier.GPU, pack_hashes(HASHES.chains[BLOCK]))]))
    for cached in (8, None):
        routing, legs = RequestRouting(made, "m"), list[Leg | Pair | Response]()
        routing.prompt = Prompt(10, HASHES)
        routing.route(frozenset(), legs.append)
        (leg,) = legs
        assert isinstance(leg, Leg)
        routing.finished(Outcome(leg, 200, "complete", 0.1, 0.2, 10, cached, None))
    audit.tick(100.0)
    status = audit.status(RANK)
    assert status
    assert status.bias == pytest.approx(8 / 20, abs=0.01)  # of two requests the second had none of what was believed in


def test_what_an_engine_computes_again_says_nothing_of_what_it_holds() -> None:
    indexer = KVIndexer()
    audit = IndexAudit(indexer, lambda _: None, has_store=False)
    made = context()._replace(indexer=indexer, audit=audit)
    indexer.watch(RANK)
    indexer.on_batch(EventBatch("w", 0, 1, 0, [Stored(Tier.GPU, pack_hashes(HASHES.chains[BLOCK]))]))
    routing, legs = RequestRouting(made, "m", asking(recomputed=True)), list[Leg | Pair | Response]()
    routing.prompt = Prompt(10, HASHES)
    routing.route(frozenset(), legs.append)
    (leg,) = legs
    assert isinstance(leg, Leg)
    routing.finished(Outcome(leg, 200, "complete", 0.1, 0.2, 10, 0, None))
    audit.tick(100.0)
    assert audit.status(RANK) is None


@pytest.mark.parametrize(("uncached", "overlap", "work"), [(False, 8, 2), (True, 0, 10)])
def test_what_an_engine_computes_again_is_work_whatever_is_there(uncached: bool, overlap: int, work: int) -> None:
    made = context()
    made.indexer.on_batch(EventBatch("w", 0, 1, 0, [Stored(Tier.GPU, pack_hashes(HASHES.chains[BLOCK]))]))
    routing, legs = RequestRouting(made, "m", asking(uncached=uncached)), list[Leg | Pair | Response]()
    routing.prompt = Prompt(10, HASHES)
    routing.route(frozenset(), legs.append)
    (leg,) = legs
    assert isinstance(leg, Leg)
    assert leg.decision.overlap_tokens == overlap
    assert made.book.load(RANK, 0.0).prefill_tokens == work


def test_what_an_engine_computes_again_is_there_afterwards() -> None:
    made = context()
    routing = RequestRouting(made, "m", asking(uncached=True))
    routing.prompt = Prompt(10, HASHES)
    routing.route(frozenset(), lambda routed: None)
    assert RANK in made.indexer.find_matches(HASHES)


@pytest.mark.parametrize(("uncached", "blocks"), [(False, 2), (True, 0)])
def test_what_an_engine_computes_again_does_not_count_as_looked_up_in_a_store(uncached: bool, blocks: int) -> None:
    made = context()._replace(has_store=True)
    routing = RequestRouting(made, "m", asking(uncached=uncached))
    routing.prompt = made.hash_prompt(range(10), PLAIN)
    routing.route(frozenset(), lambda routed: None)
    registry = made.metrics.registry
    assert registry.get_sample_value("router_kv_looked_up_blocks_total", {"tier": "store"}) == blocks
    assert registry.get_sample_value("router_kv_looked_up_blocks_total", {"tier": "local"}) == 2


@pytest.mark.parametrize("guessed", [False, True])
@pytest.mark.parametrize("uncached", [False, True])
def test_a_prompt_that_is_refused_takes_back_only_what_was_not_there_before(uncached: bool, guessed: bool) -> None:
    """Also where the engine would have computed all of it again."""
    made, before = context(), hash_prompt(range(4), {BLOCK}, PLAIN)
    made.predict(RANK, before.chain(BLOCK), guessed)
    routing, legs = RequestRouting(made, "m", asking(uncached=uncached)), list[Leg | Pair | Response]()
    routing.prompt = Prompt(10, HASHES, guessed=guessed)
    routing.route(frozenset(), legs.append)
    (leg,) = legs
    assert isinstance(leg, Leg)
    assert blocks_held(made, routing.prompt) == 2
    routing.finished(Outcome(leg, 400, "complete", 0.1, 0.2, None, None))
    assert blocks_held(made, routing.prompt) == 1


def test_a_worker_that_turns_out_to_run_another_engine_gets_nothing_that_waits() -> None:
    made = context()
    routing = RequestRouting(made, "m", asking(engine="sglang"))
    kinds: tuple[tuple[EngineKind, int], ...] = (("unknown", 1), ("vllm", 0), ("sglang", 1))
    for kind, ranks in kinds:
        made.fleet.redescribe(made.fleet.workers["w"], EngineDescription(kind, models=(Model("m"),), block_size=BLOCK))
        assert len(routing.candidates()) == ranks


def test_what_cannot_be_sent_is_given_back_and_answered() -> None:
    made, answers = context(), list[Response]()

    def fail(routed: Leg | Pair | Response) -> None:
        if not isinstance(routed, Response):
            raise OverflowError
        answers.append(routed)

    RequestRouting(made, "m").route(frozenset(), fail)
    assert made.book.booked(RANK) == 0
    assert [answer.status for answer in answers] == [500]


def test_a_fault_in_recording_a_decision_costs_neither_the_answer_nor_the_booking(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(ArmTally):
        def routed(self, decision: Decision) -> None:
            raise KeyError(decision.rank)

    made, routed = context(), list[Leg | Pair | Response]()
    arm = Arm("a", LeastLoaded())
    arm.tally = Fails()
    routing = RequestRouting(made, "m", asking(arm=arm))
    routing.prompt = Prompt(10, HASHES)
    routing.route(frozenset(), routed.append)
    (leg,) = routed
    assert isinstance(leg, Leg)
    assert made.book.booked(RANK) == 1, "until its answer has ended"
    assert caplog.messages == ["A decision could not be recorded"]


def asking(**said: Any) -> RoutingOptions:
    options = RoutingOptions()
    for name, value in said.items():
        assert hasattr(options, name)
        setattr(options, name, value)
    return options


def with_a_pair() -> RouterContext:
    """`context`, and two workers that serve "m2" together."""
    made = context()
    for name, role in (("p", "prefill"), ("d", "decode")):
        url = f"http://{name}:1"
        worker = Worker(parse_worker(f"{url},name={name},role={role},connector=nixl"), Pool(url, 1.0))
        worker.description = EngineDescription("vllm", models=(Model("m2"),), block_size=BLOCK)
        made.fleet.add(worker)
        made.fleet.mark_up(worker)
        made.scheduler.watch(WorkerRank(name, 0), BLOCK)
    return made


@pytest.mark.parametrize(
    ("model", "exclude", "asked"),
    [("m", [], "w"), ("m", ["w"], None), ("m2", [], "p"), ("m2", ["d"], None), (None, [], "w"), (None, ["w"], "p")],
)
def test_who_is_asked_for_the_tokens_of_a_prompt_could_compute_it(
    model: str | None, exclude: list[str], asked: str | None
) -> None:
    routing = RequestRouting(with_a_pair(), model, asking(body=b'{"prompt":"x"}'))
    worker = routing.idlest_worker(frozenset(exclude))
    assert (worker and worker.id) == asked


@pytest.mark.parametrize(
    ("streamed", "limits", "seconds"),
    [
        (True, b"", 300.0),
        (True, b',"max_tokens":10', 300.0),
        (False, b"", None),
        (False, b',"max_tokens":10', 305.0),
        (False, b',"max_tokens":-1', 300.0),
        (False, b',"max_tokens":1' + b"0" * 300, 300.0 + 2**30),
    ],
)
def test_an_answer_that_comes_whole_may_take_longer_to_begin(
    streamed: bool, limits: bytes, seconds: float | None
) -> None:
    options = asking(streamed=streamed, body=b'{"prompt":"x"%b}' % limits)
    routed = list[Leg | Pair | Response]()
    RequestRouting(with_a_pair(), "m2", options).route(frozenset(), routed.append)
    (pair,) = routed
    assert isinstance(pair, Pair)
    assert (pair.prefill_timeout, pair.decode_timeout) == (300.0, seconds)


def test_a_fault_in_choosing_a_decode_worker_is_a_failure_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(SplitBodies):
        def go_on(self, answer: Prefilled | None) -> bytes:
            raise KeyError("room")

    made, routed = with_a_pair(), list[Leg | Pair | Response]()
    routing = RequestRouting(made, "m2", asking(body=b'{"prompt":"x","max_tokens":2}'))
    routing._bodies = Fails(b'{"prompt":"x","max_tokens":2}')
    routing.route(frozenset(), routed.append)
    (pair,) = routed
    assert isinstance(pair, Pair)
    failure = routing.go_on(pair.prefill, Prefilled(), frozenset())
    assert isinstance(failure, Failure)
    assert failure.harmless, "the prefill worker is not to blame"
    pair.prefill.reservation.release(0.0)
    assert [made.book.booked(WorkerRank(name, 0)) for name in "pd"] == [0, 0]
    assert caplog.messages == ["A decode worker could not be chosen"]


def test_who_waits_for_its_worker_to_come_back_takes_nothing_of_what_others_may_retry() -> None:
    made = context()
    made = made._replace(outage=Outage(60.0, made.queue.limits))
    gone = Failure("unreachable", "cannot be reached")
    for _ in range(200):
        legs = list[Leg | Pair | Response]()
        routing = RequestRouting(made, "m")
        routing.route(frozenset(), legs.append)
        (leg,) = legs
        assert isinstance(leg, Leg)
        assert routing.waits_for(frozenset((leg.worker.id,)))
        routing.failed(leg, gone, retried=True)
        made.fleet.mark_up(leg.worker)
    assert made.retries.has(0.0, 0)
