"""What the simulated worker publishes, read by the codecs that read real engines."""

from __future__ import annotations

import asyncio
import socket
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

import engines.sglang.decode
import engines.vllm.decode
from engines.description import EngineDescription
from engines.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineBatch
from engines.load import poll
from engines.probe import Answer, probe
from engines.problems import EVENTS_OFF
from indexer.handles import BlockHandles
from indexer.hashing import chain_hashes, pack_tokens, root_hash
from indexer.types import Namespace, Tier
from publishers.zmq_source import ZmqSource
from tests.engines.sim.fleets import BLOCK, Client, client, zmq_socket
from tests.fakes.waiting import until

CODECS: dict[str, ModuleType] = {"vllm": engines.vllm.decode, "sglang": engines.sglang.decode}
FLAVOURS = sorted(CODECS)
FIRST = {"vllm": 0, "sglang": 1}
"""The first seq that a request makes: SGLang tells of its empty cache before."""
TOKENS = list(range(100, 140))
END_OF_REPLAY = b"\xff" * 8


async def drive(worker: Client, steps: Any) -> Any:
    """Run a dialogue (probe, poll) against the worker."""
    path = next(steps)
    while True:
        async with worker.session.get(worker.url + path) as response:
            answer = Answer(response.status, await response.read())
        try:
            path = steps.send(answer)
        except StopIteration as done:
            return done.value


async def describe(worker: Client) -> EngineDescription:
    found = await drive(worker, probe("127.0.0.1"))
    assert isinstance(found, EngineDescription)
    return found


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_a_worker_with_an_ipv6_address() -> None:
    async with client(host="::1") as worker:
        assert worker.url.startswith("http://[::1]:")
        await worker.complete(TOKENS)
        (source,) = (await drive(worker, probe("::1"))).event_sources
        assert source.endpoint.startswith("tcp://[::1]:")
        log = Log()
        follower = ZmqSource(source, log)
        follower.start()
        await until(lambda: log.payloads)
        await follower.close()


class Log:
    """An EventSink that keeps what is applied."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def apply(self, payload: bytes, past: bool) -> None:
        self.payloads.append(payload)

    def new_epoch(self) -> None: ...

    def lose_track(self) -> None: ...

    def follow(self, caught_up: bool) -> None: ...


async def receive(subscriber: zmq.asyncio.Socket, flavour: str, count: int) -> list[tuple[int, EngineBatch]]:
    """The next `count` batches with their seq."""
    found = []
    for _ in range(count):
        _, seq, payload = await subscriber.recv_multipart()
        found.append((int.from_bytes(seq, "big"), CODECS[flavour].decode(payload)))
    return found


async def replay(worker: Client, flavour: str, start: int, rank: int = 0) -> list[tuple[int, EngineBatch]]:
    """All batches that the worker keeps from seq `start` on."""
    return [(seq, CODECS[flavour].decode(payload)) for seq, payload in await replayed(worker, start, rank)]


async def replayed(worker: Client, start: int, rank: int = 0) -> list[tuple[int, bytes]]:
    """The same as it came."""
    endpoint = (await describe(worker)).event_sources[rank].replay
    assert endpoint is not None
    found: list[tuple[int, bytes]] = []
    async with zmq_socket(zmq.DEALER, endpoint) as dealer:
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            empty, topic, seq, payload = await dealer.recv_multipart()
            assert (empty, topic) == (b"", b"kv@w0@sim")
            if seq == END_OF_REPLAY:
                assert payload == b""
                return found
            found.append((int.from_bytes(seq, "big"), payload))


def apply(handles: BlockHandles, batch: EngineBatch) -> None:
    assert batch.skipped == {}
    for event in batch.events:
        if isinstance(event, BlockStored):
            assert event.extras == ()
            root = root_hash(event.namespace)
            handles.store(event.tier, event.engine_hashes, event.parent, event.token_ids, event.block_size, root)
        elif isinstance(event, BlockRemoved):
            handles.remove(event.tier, event.engine_hashes)
        else:
            handles.clear()


def index(batches: list[tuple[int, EngineBatch]]) -> BlockHandles:
    handles = BlockHandles()
    for _, batch in batches:
        apply(handles, batch)
    return handles


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_events_index_to_the_blocks_that_the_cache_holds(flavour: str) -> None:
    async with client(flavour=flavour, cache_tokens=12 * BLOCK, loras=("adapter",)) as worker:
        adapted = ADAPTED[flavour]
        for number, more in enumerate([{}, adapted, {"cache_salt": "s"}, {}, adapted]):
            await worker.complete([number * 1000 + i for i in range(60)], 40, **more)
        batches = await replay(worker, flavour, 0)
        assert any(isinstance(event, BlockRemoved) for _, batch in batches for event in batch.events)
        held = index(batches).held()
        assert set(held) == {Tier.GPU}
        assert set(held[Tier.GPU]) == set(worker.scheduler.cache._block)


ADAPTED = {"vllm": {"model": "adapter"}, "sglang": {"model": "sim:adapter"}}


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("namespace", [Namespace(), Namespace("adapter", "s")])
async def test_events_hash_to_our_own(flavour: str, namespace: Namespace) -> None:
    more = {"cache_salt": "s", **ADAPTED[flavour]} if namespace.lora_name else {}
    async with client(flavour=flavour, loras=("adapter",)) as worker:
        await worker.complete(TOKENS, 1, **more)
        ((seq, batch),) = await replay(worker, flavour, FIRST[flavour])
        assert (seq, batch.dp_rank) == (FIRST[flavour], 0)
        ours = chain_hashes(pack_tokens(TOKENS), BLOCK, root_hash(namespace)).tolist()
        held = index([(seq, batch)]).held()
        assert set(held) == {Tier.GPU}
        assert sorted(held[Tier.GPU]) == sorted(ours)
        (event,) = batch.events
        assert isinstance(event, BlockStored)
        assert not set(event.engine_hashes) & set(ours)  # whoever takes the engine's hash for ours is found out


async def test_sglangs_hashes_are_signed() -> None:
    async with client(flavour="sglang") as worker:
        await worker.complete(list(range(160)), 1)
        ((_, payload),) = await replayed(worker, FIRST["sglang"])
        (event,) = msgspec.msgpack.decode(payload)[1]
        assert any(name < 0 for name in event["block_hashes"])


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_subscriber_gets_numbered_batches(flavour: str) -> None:
    async with client(flavour=flavour) as worker:
        endpoint = (await describe(worker)).event_sources[0].endpoint
        async with zmq_socket(zmq.SUB, endpoint) as socket:
            first = await subscribed(worker, socket, flavour)
            await worker.complete(TOKENS, 12)
            batches = await receive(socket, flavour, 2)
            assert [seq for seq, _ in batches] == [first + 1, first + 2]
            assert len(index(batches)) == 3  # two prompt blocks, and one that the answer filled


async def subscribed(worker: Client, socket: zmq.asyncio.Socket, flavour: str) -> int:
    """Make events until one arrives, and then until all have; the last one's seq."""
    made = 0
    while not await socket.poll(10):
        await worker.complete([10**6 + made] * 17, 1)
        made += 1
    seq = -1
    while seq < FIRST[flavour] + made - 1:
        ((seq, _),) = await receive(socket, flavour, 1)
    return seq


async def test_replay_starts_where_it_is_asked_to() -> None:
    async with client() as worker:
        for number in range(4):
            await worker.complete([number] * 17, 1)
        assert [seq for seq, _ in await replay(worker, "vllm", 0)] == [0, 1, 2, 3]
        assert [seq for seq, _ in await replay(worker, "vllm", 2)] == [2, 3]
        assert await replay(worker, "vllm", 9) == []
        assert await replay(worker, "vllm", 2**64 - 1) == []


def kinds(batches: list[tuple[int, EngineBatch]]) -> list[type]:
    return [type(event) for _, batch in batches for event in batch.events]


@pytest.mark.parametrize(
    ("flavour", "path", "before", "after"),
    [
        ("vllm", "/reset_prefix_cache", [], [AllBlocksCleared, BlockStored]),  # only with the next step, as vLLM does
        ("sglang", "/flush_cache", [AllBlocksCleared], [AllBlocksCleared, BlockStored]),
    ],
)
async def test_a_reset_is_published(flavour: str, path: str, before: list[type], after: list[type]) -> None:
    async with client(flavour=flavour) as worker:
        await worker.complete(TOKENS, 1)
        status, _ = await worker.post(path)
        assert status == 200
        assert kinds(await replay(worker, flavour, FIRST[flavour] + 1)) == before
        answer = await worker.complete(TOKENS, 1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert kinds(await replay(worker, flavour, FIRST[flavour] + 1)) == after


@pytest.mark.parametrize(("flavour", "told"), [("vllm", []), ("sglang", [AllBlocksCleared])])
async def test_sglang_tells_of_its_empty_cache_when_it_starts(flavour: str, told: list[type]) -> None:
    async with client(flavour=flavour, dp_size=2) as worker:
        assert [kinds(await replay(worker, flavour, 0, rank)) for rank in range(2)] == [told, told]


@pytest.mark.parametrize(
    ("flavour", "path", "answer"),
    [
        ("vllm", "/reset_prefix_cache", (200, {"success": False})),
        ("sglang", "/flush_cache", (400, "Flush cache failed.\n")),
    ],
)
async def test_a_reset_waits_for_nobody(flavour: str, path: str, answer: Any) -> None:
    async with client(flavour=flavour, speedup=1e-6) as worker:
        asking = asyncio.create_task(worker.complete(TOKENS))
        await until(lambda: worker.scheduler.busy)
        assert await worker.post(path) == answer
        asking.cancel()


async def test_sglang_flushes_its_cache_on_a_get_too() -> None:
    async with client(flavour="sglang") as worker:
        await worker.complete(TOKENS, 1)
        assert (await worker.get("/flush_cache")).startswith("Cache flushed.")
        assert worker.scheduler.cache.hashes == []


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_ranks_publish_apart(flavour: str) -> None:
    async with client(flavour=flavour, dp_size=3) as worker:
        sources = (await describe(worker)).event_sources
        ports = [int(source.endpoint.rsplit(":", 1)[1]) for source in sources]
        assert ports == [ports[0], ports[0] + 1, ports[0] + 2]
        await worker.post("/v1/completions", {"prompt": TOKENS, "max_tokens": 1}, X_data_parallel_rank="2")
        first = FIRST[flavour]
        assert [len(await replay(worker, flavour, first, rank)) for rank in range(3)] == [0, 0, 1]
        ((_, batch),) = await replay(worker, flavour, first, 2)
        assert batch.dp_rank == 2


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_no_events_when_told_so(flavour: str) -> None:
    """It says so itself, as the engines do: it is not too old to say where they are."""
    async with client(flavour=flavour, kv_events=False) as worker:
        await worker.complete(TOKENS, 20)
        found = await describe(worker)
        assert (found.event_sources, found.problems) == ((), (EVENTS_OFF,))


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_the_probe_understands_it(flavour: str) -> None:
    async with client(flavour=flavour, dp_size=2, max_num_seqs=7, max_num_batched_tokens=64) as worker:
        found = await describe(worker)
        assert found.kind == flavour
        assert (found.block_size, found.dp_size, found.total_blocks) == (BLOCK, 2, 200)
        assert [model.id for model in found.models] == ["sim"]
        assert found.models[0].max_model_len == 3200
        assert [source.dp_rank for source in found.event_sources] == [0, 1]
        assert {source.topic for source in found.event_sources} == {"kv@w0@sim"}


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_its_load_is_understood(flavour: str) -> None:
    async with client(flavour=flavour, speedup=1e-6, max_num_seqs=1) as worker:
        asking = [asyncio.create_task(worker.complete(TOKENS)) for _ in range(3)]
        await until(lambda: len(worker.scheduler.waiting) == 2)
        load = (await drive(worker, poll(await describe(worker))))[0]
        assert (load.request_active_slots, load.num_requests_waiting) == (1, 2)
        assert load.gpu_cache_usage_perc == pytest.approx(3 / 200)
        for task in asking:
            task.cancel()
