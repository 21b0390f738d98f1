"""Beside Dynamo's selection service: wire forms, the order of calls, options, table and verdict."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
from typing import cast

import aiohttp
import pytest
from rich.console import Console

from router.ab.client import Outcome
from router.ab.errors import RunError
from router.ab.machine import Cost
from router.ab.prompts import completion_body
from router.ab.statistics import Record
from router.ab.trace import Row
from scripts.bench.cpu import descendants
from scripts.bench.selection import forms
from scripts.bench.selection.arms import Measured, check_credit
from scripts.bench.selection.asking import Asking
from scripts.bench.selection.options import Options, read_options, rotated
from scripts.bench.selection.report import ArmReport, Report, arm_report, judge, sentences, table
from scripts.bench.selection.service import Service, Tally

# As ai-dynamo 1.6.1 answers.
SELECTED = (
    b'{"selection_id":"b","sequence_hashes":[-7623552809318391097,4102179227871607950],"isl_tokens":100,'
    b'"track_prefill_tokens":true,"model_name":"sim","routing_group":"default","worker_id":1,"dp_rank":0,'
    b'"endpoint":"http://127.0.0.1:19401","block_size":16,"overlap":{"longest_matched":96,"gpu":96,"dp":{"0":96},'
    b'"cpu":96,"disk":96},"effective_prefill_tokens":4,"potential_decode_blocks":7}'
)
NOT_READY = (
    b'{"ready":false,"schedulable_workers":0,"workers":[{"worker_id":0,"model_name":"sim","lifecycle":"incomplete",'
    b'"endpoint":"http://127.0.0.1:19400","not_schedulable_reasons":["kv_events endpoint is required for dp_rank 0"]}]}'
)
SCORES = (
    b'{"block_size":16,"num_blocks":6,"workers":[{"worker_id":0,"dp_rank":0,"device_blocks":0,"disk_blocks":0},'
    b'{"worker_id":1,"dp_rank":0,"device_blocks":6,"disk_blocks":6}],"shared_cache":{"enabled":false}}'
)
AGAIN = [Row(0, 3, 2, (7,)), Row(1, 3, 2, (7,))]


def test_a_worker_is_registered_with_what_its_engine_tells() -> None:
    worker = forms.Worker(3, "sim", "http://127.0.0.1:18003", 16, "tcp://127.0.0.1:19006", "tcp://127.0.0.1:19007", 99)
    assert forms.registration(worker) == (
        b'{"worker_id":3,"model_name":"sim","endpoint":"http://127.0.0.1:18003","block_size":16,'
        b'"kv_events_endpoint":"tcp://127.0.0.1:19006","replay_endpoint":"tcp://127.0.0.1:19007","total_kv_blocks":99}'
    )


def test_a_selection_is_asked_for_with_the_prompt_of_the_request() -> None:
    body = completion_body(AGAIN[0], 'a "model"', seed=0)
    tokens = body.rpartition(b"[")[2].removesuffix(b"]}")
    assert tokens.count(b",") == 2
    assert forms.selection("17", 'a "model"', body) == (
        b'{"selection_id":"17","model_name":"a \\"model\\"","token_ids":[' + tokens + b"]}"
    )


def test_reservations_have_their_paths_and_overlap_its_query() -> None:
    assert forms.prefill_complete("17") == "/reservations/17/prefill_complete"
    assert forms.reservation("17") == "/reservations/17"
    assert forms.overlap_query("sim", [1, 2]) == b'{"model_name":"sim","token_ids":[1,2]}'


def test_answers_are_read() -> None:
    choice = forms.read_selection(SELECTED)
    assert (choice.endpoint, choice.isl_tokens, choice.overlap.gpu) == ("http://127.0.0.1:19401", 100, 96)
    reason = "http://127.0.0.1:19400: kv_events endpoint is required for dp_rank 0"
    assert forms.read_ready(NOT_READY).reasons() == reason
    assert [forms.cached_blocks(SCORES, worker) for worker in (0, 1, 2)] == [0, 6, 0]


def test_an_answer_without_overlap_is_refused_loudly() -> None:
    with pytest.raises(RunError, match="another version"):
        forms.read_selection(b'{"worker_id":1,"endpoint":"http://a:1","isl_tokens":100}')


class _FakeService(Service):
    """Always chooses one worker; keeps what it was told."""

    def __init__(self, endpoint: str) -> None:
        super().__init__("http://nowhere", "sim", cast("aiohttp.ClientSession", None))
        self.endpoint, self.told = endpoint, list[str]()

    async def reserve(self, name: str, body: bytes) -> forms.Selection:
        self.told.append(f"reserve {name}")
        if not self.endpoint:
            raise RunError("status 503: no worker")
        return forms.Selection(0, self.endpoint, 3, forms._Overlap(0))

    async def prefilled(self, name: str) -> None:
        self.told.append(f"prefilled {name}")

    async def release(self, name: str) -> None:
        self.told.append(f"released {name}")


class _SilentService(_FakeService):
    async def reserve(self, name: str, body: bytes) -> forms.Selection:
        await asyncio.Event().wait()
        return await super().reserve(name, body)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {}\n\n")
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.write(b'data: {"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n')
    writer.close()
    await writer.wait_closed()


async def test_the_service_hears_of_the_first_byte_and_of_the_end() -> None:
    async with await asyncio.start_server(_answer, "127.0.0.1", 0) as server:
        service = _FakeService(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        outcome = await Asking(service, timeout=5).send(b'{"prompt":[1,2,3]}')
    assert service.told == ["reserve 0", "prefilled 0", "released 0"]
    assert (outcome.error, outcome.worker, outcome.prompt_tokens) == ("", service.endpoint, 3)
    assert outcome.sent < outcome.first < outcome.last


async def test_a_refused_selection_and_a_dead_worker_are_errors_of_the_request() -> None:
    refused = await Asking(_FakeService(""), timeout=5).send(b'{"prompt":[1]}')
    assert refused.error == "no worker was selected: status 503: no worker"
    unanswered = await Asking(_SilentService(""), timeout=0).send(b'{"prompt":[1]}')
    assert unanswered.error == "no worker was selected: no answer in time"
    dead = _FakeService("http://127.0.0.1:1")
    outcome: Outcome = await Asking(dead, timeout=5).send(b'{"prompt":[1]}')
    assert outcome.error.startswith("cannot connect to http://127.0.0.1:1")
    assert dead.told == ["reserve 0", "released 0"]


def test_a_service_that_credits_nothing_or_fails_makes_no_comparison() -> None:
    check_credit(Tally(6, 3), AGAIN)
    check_credit(Tally(3, 0), AGAIN[:1])
    with pytest.raises(RunError, match="never took a token for cached"):
        check_credit(Tally(6, 0), AGAIN)
    with pytest.raises(RunError, match="2 calls to the selection service failed; the first: a"):
        check_credit(Tally(6, 3, ["a", "b"]), AGAIN)


def test_by_default_it_is_the_acceptance_run() -> None:
    plan = read_options([]).plan
    assert (plan.duration, plan.rate, plan.speedup, plan.sim_workers) == (480, 2, 1, 8)
    assert (plan.modes, plan.baseline) == (("ours", "dynamo", "round-robin"), "dynamo")


@pytest.mark.parametrize(
    "flag", ["--modes=kv", "--worker=http://a:1", "--arms=ours,ours", "--arms=x", "--repeats=0", "--rate=1,2"]
)
def test_flags_that_mean_nothing_here_are_refused(flag: str) -> None:
    with pytest.raises(RunError):
        read_options([flag])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_fleet_and_the_router(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "scripts.bench.selection", "--arms", "round-robin", "--speedup", "40"]
    with subprocess.Popen([*command, "--rate", "0.05", "--limit", "40"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("round-robin, 1: ")  # requests are being answered
        started = descendants(process.pid)[1:]
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            descendants(pid)


def test_arms_take_turns_at_being_first() -> None:
    assert [rotated("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]


def _record(ttft: float, tpot: float, error: str = "") -> Record:
    return Record(0, 0.0, 0.0, 200, error, "w", ttft, tpot, ttft + tpot, 100, 25, 2, 2)


def _arm(arm: str, *repeats: tuple[float, float], error: str = "", tally: Tally | None = None) -> ArmReport:
    cost = Cost(wall=10, generator_cpu=1, children_cpu=4, machine_cpu=6, cores=2, chunks=4)
    measured = [Measured(arm, (_record(ttft, tpot, error), _record(ttft, tpot)), cost, tally) for ttft, tpot in repeats]
    return arm_report(arm, measured, [2], read_options([]).plan)


def test_each_goal_is_judged_over_all_repeats() -> None:
    verdicts = judge([_arm("ours", (0.5, 0.01), (0.6, 0.02)), _arm("dynamo", (1.0, 0.01), (1.0, 0.01))])
    assert [(one.what, round(one.ratio, 3), one.verdict) for one in verdicts] == [
        ("mean TTFT", 0.55, "met"),
        ("p99 TTFT", 0.6, "met"),
        ("median TPOT", 1.5, "not met"),
    ]
    assert verdicts[0].repeats == (0.5, 0.6)


def test_repeats_that_follow_each_other_are_no_more_a_second() -> None:
    once, thrice = _arm("ours", (0.5, 0.5)).summary, _arm("ours", *[(0.5, 0.5)] * 3).summary
    assert (once.duration, once.requests_per_second, once.output_tokens_per_second) == (1.0, 2.0, 4.0)
    assert (thrice.duration, thrice.requests_per_second, thrice.output_tokens_per_second) == (3.0, 2.0, 4.0)


def test_nothing_is_judged_without_both_or_with_failures() -> None:
    assert judge([_arm("ours", (1, 1)), _arm("round-robin", (1, 1))]) == ()
    verdicts = judge([_arm("ours", (0.1, 0.1)), _arm("dynamo", (1, 1), error="status 500")])
    assert {one.verdict for one in verdicts} == {"void, 1 requests failed"}


def test_the_table_has_a_row_per_arm_and_the_verdicts_below() -> None:
    arms = (_arm("ours", (0.5, 0.01)), _arm("dynamo", (1.0, 0.0125), tally=Tally(200, 50)))
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table(arms))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert ["ours", "2", "0", "0.500", "0.500", "0.500", "10.00", "25.0", "30, 25"] in rows
    assert ["dynamo", "2", "0", "1.000", "1.000", "1.000", "12.50", "25.0", "30, 25"] in rows
    report = Report((), "", "ai-dynamo==1.6.1", {}, {}, arms, judge(arms))
    assert sentences(report)[:2] == [
        "ai-dynamo==1.6.1 took 25.0% of its prompt tokens for cached",
        "mean TTFT: ours is 0.500 × dynamo's, goal ≤ 0.6: met",
    ]


def test_options_hold_a_plan() -> None:
    options = read_options(["--arms", "ours,dynamo", "--repeats", "2", "--rate", "1", "--router-arg=--max-queue=3"])
    assert isinstance(options, Options)
    assert (options.repeats, options.plan.rate, options.plan.router_args) == (2, 1, ("--max-queue=3",))
