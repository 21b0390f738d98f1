"""Which workers can serve a request in two parts, and what is said of those that cannot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from engines.description import EngineDescription, Model
from router.http.pool import Pool
from router.split.pairing import _Kind, _kind, counterparts, lack, make_split, ranks_of, why_unpaired
from router.workers.fleet import Fleet
from router.workers.spec import parse_worker
from router.workers.worker import Worker
from tests.fakes.raw_client import get, post
from tests.fakes.scripted_worker import Pages, ScriptedWorker
from tests.router.disaggregation.fleets import running
from tests.router.proxy.running import RunningRouter

Scripted = list[ScriptedWorker]
M, N = Model("m"), Model("n")


def worker(
    name: str,
    keys: str,
    *models: Model,
    kind: str = "vllm",
    dp_size: int = 1,
    engine_ids: Sequence[int] = (),
    url: str | None = None,
) -> Worker:
    """Its name begins with its role's letter."""
    role = {"p": "prefill", "d": "decode", "b": "both"}[name[0]]
    spec = parse_worker(f"{url or f'http://{name}:8000'},name={name},role={role}{keys and ',' + keys}")
    made = Worker(spec, Pool(spec.url, 1.0))
    made.description = EngineDescription(kind, models=models or (M,), dp_size=dp_size, block_size=16)  # type: ignore[arg-type]
    made.engine_ids = {rank: f"{name}-{rank}" for rank in engine_ids}
    return made


def pairs(*workers: Worker) -> dict[str, list[str]]:
    """For each prefill rank the decode ranks that it can hand over to."""
    split = make_split(workers)
    if split is None:
        return {}
    decodes = [[str(rank) for rank in each.ranks] for each in split.decodes]
    return dict(zip(map(str, split.prefills.ranks), decodes, strict=True))


def test_the_models_of_each_worker_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds of adapters and thousands of ranks it took 20 ms whenever a worker came or went."""
    looks: Counter[str] = Counter()

    def look(worker: Worker) -> _Kind:
        looks[worker.id] += 1
        return _kind(worker)

    monkeypatch.setattr("router.split.pairing._kind", look)
    workers = [worker(name, NIXL, dp_size=4) for name in ("p1", "p2", "d1", "d2")]
    assert len(pairs(*workers)) == 8
    assert looks == {"p1": 1, "p2": 1, "d1": 1, "d2": 1}
    assert pairs(*workers[2:]) == {}
    assert looks.total() == 4, "nobody is there to hand over"


def test_only_who_uses_the_shared_store_is_credited_with_what_it_holds() -> None:
    workers = [worker("b1", "store=true"), worker("b2", "store=false"), worker("b3", "")]
    parted = make_split([worker("p", NIXL), worker("d", NIXL)])
    for ranks in (ranks_of(workers), ranks_of(workers, parted).whole):
        assert ranks.uses_store.tolist() == [True, False, True]


NIXL = "connector=nixl"
MOONCAKE = "connector=mooncake"


@pytest.mark.parametrize(("sick", "well"), [("p", "d"), ("d", "p"), ("b", "d"), ("b", "p")])
def test_a_first_try_may_go_to_who_is_sick_where_nobody_who_is_well_can_serve(sick: str, well: str) -> None:
    """A part of those that it takes is as good as nobody."""
    fleet = Fleet([worker(sick, NIXL), worker(well, NIXL)])
    for each in fleet.workers.values():
        fleet.mark_up(each)
    fleet.trip(fleet.workers[sick], "a test", 0.0)
    assert fleet.candidates("m")
    assert not fleet.candidates("m", {"another"}), "but no second one"


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([], {}),
        ([worker("p", NIXL)], {}),
        ([worker("d", NIXL)], {}),
        ([worker("b", ""), worker("p", NIXL)], {}),
        ([worker("b", NIXL), worker("p", NIXL)], {"p#0": ["b#0"]}),
        ([worker("b", NIXL), worker("p", NIXL), worker("d", NIXL)], {"p#0": ["b#0", "d#0"]}),
        ([worker("b", NIXL), worker("d", NIXL)], {}),
        ([worker("p", NIXL), worker("d", NIXL)], {"p#0": ["d#0"]}),
        ([worker("p", NIXL, dp_size=2), worker("d", NIXL, dp_size=2)], {"p#0": ["d#0", "d#1"], "p#1": ["d#0", "d#1"]}),
        ([worker("p", NIXL, M), worker("d", NIXL, N)], {}),
        ([worker("p", NIXL, M, Model("lora", parent="m")), worker("d", NIXL, M)], {"p#0": ["d#0"]}),
        ([worker("p", NIXL + ",block_size=32"), worker("d", NIXL)], {}),
        ([worker("p", NIXL), worker("d", "connector=store")], {}),
        ([worker("p", NIXL), worker("d", NIXL, kind="sglang")], {}),
        ([worker("p", ""), worker("d", "")], {}),
        ([worker("p", ""), worker("d", NIXL)], {}),
        ([worker("p", MOONCAKE), worker("d", MOONCAKE)], {}),
        ([worker("p", MOONCAKE, engine_ids=[0]), worker("d", MOONCAKE)], {"p#0": ["d#0"]}),
        ([worker("p", MOONCAKE, engine_ids=[0], dp_size=2), worker("d", MOONCAKE)], {}),
        ([worker("p", MOONCAKE, engine_ids=[3]), worker("d", MOONCAKE)], {"p#0": ["d#0"]}),
        (
            [worker("p1", NIXL), worker("p2", "connector=store"), worker("d1", NIXL), worker("d2", "connector=store")],
            {"p1#0": ["d1#0"], "p2#0": ["d2#0"]},
        ),
    ],
)
def test_who_hands_over_to_whom(workers: list[Worker], found: dict[str, list[str]]) -> None:
    assert pairs(*workers) == found


def test_those_of_one_host_are_near() -> None:
    workers = [worker("p", NIXL + ",host=x"), worker("d1", NIXL + ",host=x"), worker("d2", NIXL), worker("d3", NIXL)]
    split = make_split(workers)
    assert split
    assert [near.tolist() for near in split.near] == [[True, False, False]]
    local = [worker(name, NIXL, url=f"http://n1:{port}") for port, name in enumerate(("p", "d"), 8000)]
    split = make_split([*local, worker("d2", NIXL)])
    assert split
    assert [near.tolist() for near in split.near] == [[True, False]]


def test_how_kv_is_moved_is_told_with_each_rank() -> None:
    split = make_split(
        [
            worker("p1", NIXL),
            worker("d1", NIXL),
            worker("p2", "connector=nixl-push"),
            worker("d2", "connector=nixl-push"),
        ]
    )
    assert split
    assert split.pushes == (False, True)
    assert split.connectors == {"nixl", "nixl-push"}


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([worker("b", "")], [None]),
        ([worker("p", NIXL)], ["no worker that decodes"]),
        ([worker("d", NIXL)], ["no prefill worker is up"]),
        ([worker("p", NIXL), worker("d", NIXL)], [None, None]),
        (
            [worker("p", NIXL, M), worker("d", NIXL, N)],
            ["that is up has its model", "no prefill worker that"],
        ),
        ([worker("p", ""), worker("d", "")], ["connector=NAME", "connector=NAME"]),
        ([worker("p", MOONCAKE), worker("d", MOONCAKE)], ["http://p:8998 does not tell the engine id of rank 0", None]),
    ],
)
def test_what_is_said_of_those_that_get_nothing(workers: list[Worker], said: list[str | None]) -> None:
    for each, wanted in zip(workers, said, strict=True):
        why = why_unpaired(each, counterparts(workers))
        assert (why is None) == (wanted is None), why
        assert wanted is None or wanted in str(why)


@pytest.mark.skipif(not isinstance(vars(Worker)["host"], property), reason="what is compiled cannot be watched")
@pytest.mark.parametrize("figure", ["host", "engine"])
def test_the_work_grows_with_the_workers_and_not_with_their_square(
    figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change of the fleet makes its pairs anew, and /ready says of each worker whether it has a counterpart."""
    read, reads = getattr(Worker, figure).fget, 0

    def counted(each: Worker) -> object:
        nonlocal reads
        reads += 1
        return read(each)

    monkeypatch.setattr(Worker, figure, property(counted))

    def reads_of(number: int) -> int:
        nonlocal reads
        reads = 0
        workers = [worker(f"{role}{at}", NIXL) for role in "pd" for at in range(number)]
        assert make_split(workers)
        others = counterparts(workers)
        assert not any(why_unpaired(each, others) for each in workers)
        return reads

    assert reads_of(40) == 2 * reads_of(20)


def test_what_must_be_known_first() -> None:
    assert lack(worker("p", NIXL)) is None
    assert "state it" in str(lack(worker("p", "")))
    assert "bootstrap server http://p:9000" in str(lack(worker("p", MOONCAKE + ",bootstrap_port=9000")))


def test_the_fleet_hears_of_engine_ids() -> None:
    p, d = worker("p", MOONCAKE), worker("d", MOONCAKE)
    fleet = Fleet([p, d])
    for each in (p, d):
        fleet.mark_up(each)
    assert not fleet.candidates("m")
    fleet.learn_engine_ids(p, {0: "x"})
    assert fleet.candidates("m")
    assert not fleet.candidates_of(p, "m")
    assert not fleet.candidates_of(d, "m")
    fleet.learn_engine_ids(p, {})
    assert not fleet.candidates("m")
    assert not fleet.candidates("m", {"p"})


# -- as the router tells it


@asynccontextmanager
async def router_of(
    *keys: str, models: Sequence[str] = ()
) -> AsyncIterator[tuple[RunningRouter, list[ScriptedWorker]]]:
    """A worker for each of `keys`, which begin with its name."""
    async with AsyncExitStack() as stack:
        workers = []
        for number, text in enumerate(keys):
            pages = Pages(models=[models[number] if models else "m"])
            workers.append(await stack.enter_async_context(ScriptedWorker(text.partition(",")[0], pages)))
        specs = tuple(parse_worker(f"{each.url},name={text}") for each, text in zip(workers, keys, strict=True))
        yield await stack.enter_async_context(running(specs)), workers


P, D, B = "p,role=prefill,connector=nixl", "d,role=decode,connector=nixl", "b"


@pytest.mark.parametrize(
    ("keys", "models", "why"),
    [
        ([P], [], "no worker that decodes"),
        ([D], [], "no prefill worker is up"),
        ([P, D + ",block_size=32"], [], "that is up has its model, engine, connector and block size"),
        ([P, "d,role=decode,connector=store"], [], "that is up has its model"),
        (["p,role=prefill", "d,role=decode"], [], "state it with --worker URL,connector=NAME"),
        (
            ["p,role=prefill,connector=mooncake,bootstrap_port=1", "d,role=decode,connector=mooncake"],
            [],
            "bootstrap server http://127.0.0.1:1 does not tell the engine id of rank 0",
        ),
    ],
)
async def test_a_fleet_that_serves_nothing_says_why(keys: list[str], models: list[str], why: str) -> None:
    async with router_of(*keys, models=models) as (router, _), router.client() as client:
        ready = await client.ask(get("/ready"))
        assert ready.status == 503
        told = json.loads(ready.body)
        assert told["ready"] is False
        assert any(why in problem for each in told["workers"] for problem in each["problems"])
        got = await client.ask(post(body=b'{"prompt":"x"}'))
        assert got.status == 503
        assert why in json.loads(got.body)["error"]["message"]
    async with router_of(*keys, B) as (router, workers), router.client() as client:
        ready = await client.ask(get("/ready"))
        assert ready.status == 200, "one that does it all serves"
        assert any(why in problem for each in json.loads(ready.body)["workers"] for problem in each["problems"])
        got = await client.ask(post(body=b'{"prompt":"x"}'))
        assert (got.status, got.header(b"x-router-worker")) == (200, b"b")
        assert [len(each.requests) for each in workers] == [0] * len(keys) + [1]


async def test_models_apart() -> None:
    """A model whose pair is not whole is refused with the reason, and others are served."""
    keys = [P, D, B]
    async with router_of(*keys, models=["m", "n", "n"]) as (router, _), router.client() as client:
        got = await client.ask(post(body=b'{"prompt":"x","model":"m"}'))
        assert got.status == 503
        assert b"no worker that decodes" in got.body
        assert (await client.ask(post(body=b'{"prompt":"x","model":"n"}'))).status == 200


async def test_roles_and_connectors_are_shown() -> None:
    async with router_of(P, D, B, "b2,connector=nixl") as (router, _), router.client() as client:
        told = json.loads((await client.ask(get("/ready"))).body)
        shown = {each["id"]: (each["role"], each["connector"], each["problems"][1:]) for each in told["workers"]}
        assert {name: each[:2] for name, each in shown.items()} == {
            "p": ("prefill", "nixl"),
            "d": ("decode", "nixl"),
            "b": ("both", None),
            "b2": ("both", "nixl"),
        }
