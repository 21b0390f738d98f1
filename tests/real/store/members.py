"""A Mooncake Store's master, and vLLMs that share their blocks through it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.store import Segment, Stored, VllmLayout, query_path, read_keys, read_query
from engines.store.query import ALL_KEYS, SEGMENTS, read_segments
from indexer.hashing import pack_tokens
from indexer.types import PLAIN, Namespace
from scripts.real_engines.places import engines_folder
from tests.real.asking import get
from tests.real.eventually import eventually
from tests.real.fleet import EVENTS_OFFSET
from tests.real.pd.halves import Weighted
from tests.real.processes import ROOT, Process, free_port

START = 30.0
HTTP_OFFSET = 1


class Master:
    """Comes back on its ports, and has then forgotten all."""

    def __init__(self, logs: Path) -> None:
        self.rpc_port = free_port(HTTP_OFFSET)
        self.url = f"http://127.0.0.1:{self.rpc_port + HTTP_OFFSET}"
        ports = [str(self.rpc_port), str(self.rpc_port + HTTP_OFFSET)]
        self.process = Process([str(ROOT / "scripts/real-engines"), "store-master", *ports], logs / "master.log")

    def start(self) -> None:
        self.process.start()
        eventually(lambda: get(f"{self.url}/health").status == 200, within=START)

    def keys(self) -> list[str]:
        return read_keys(get(self.url + ALL_KEYS).body)

    def held(self, keys: Sequence[str]) -> dict[str, Stored]:
        path = query_path(keys)
        assert path is not None
        return read_query(get(self.url + path).body)

    def segments(self) -> list[Segment]:
        return read_segments(get(self.url + SEGMENTS).body)


class Lender:
    """Memory for the store on another address of this machine, as of a host that serves nobody."""

    host = "127.0.0.2"

    def __init__(self, master: Master, logs: Path) -> None:
        command = [str(ROOT / "scripts/real-engines"), "store-segment", self.host, str(master.rpc_port)]
        self.process = Process(command, logs / "segment.log")

    def has(self, stored: Stored) -> bool:
        return any(owner.startswith(f"{self.host}:") for owner in stored.owners)


def client_path(folder: Path) -> Path:
    """For PYTHONPATH: Mooncake's client, out of vLLM's environment, and nothing else of that."""
    folder.mkdir()
    [packages] = (engines_folder() / "vllm" / "lib").glob("python*/site-packages")
    for name in ("mooncake", "mooncake_transfer_engine_non_cuda.libs"):
        (folder / name).symlink_to(packages / name)
    return folder


class Member(Weighted):
    """A vLLM that puts its blocks in the store."""

    def __init__(self, name: str, master: Master, logs: Path) -> None:
        self._master = master
        super().__init__(name, logs)

    def _serve(self, name: str, port: int) -> list[str]:
        ports = [port, port + EVENTS_OFFSET, self._master.rpc_port]
        return ["serve-store", name, *map(str, ports)]

    @property
    def layout(self) -> VllmLayout:
        """As it is started: the model's name is its folder's."""
        [model] = {served["root"] for served in get(f"{self.url}/v1/models").json()["data"]}
        return VllmLayout(model=model, block_size=self.block, kv_heads=2)

    def keys(self, tokens: Sequence[int], namespace: Namespace = PLAIN) -> list[str]:
        """Of a prompt's full blocks."""
        layout = self.layout
        digests = layout.hashes(pack_tokens(tokens), namespace)
        assert digests is not None
        return [key for digest in digests for key in layout.keys(digest)]

    def loaded(self) -> float:
        """Tokens that it took from the store."""
        return self.total("vllm:external_prefix_cache_hits_total")


def until_stored(master: Master, keys: Sequence[str]) -> dict[str, Stored]:
    """Engines put a request's blocks there after it ended."""
    return eventually(lambda: master.held(keys), lambda held: len(held) == len(keys))
