"""What an operator writes: YAML files, workers, stores, arms. Whatever is wrong is said in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import cast

from router import cli
from router.arm_spec import read_arms
from router.http.pool import parse_address
from router.settings import SettingsError, options
from router.store.spec import StoreSpec, read_store
from router.workers.spec import WorkerSpec, read_workers
from tests.fuzz.target import Target, place

_LARGEST = 512
_CONFIGS = Path(__file__).parents[3] / "configs"


class _File:
    """Stands for a `Path`: a file for each input would be most of the time."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_text(self, encoding: str) -> str:
        return self._content.decode(encoding)

    def __str__(self) -> str:
        return "router.yaml"


def _file(data: bytes) -> Hashable:
    try:
        values = cli._from_file(cast("Path", _File(data)), "--config")
    except SettingsError as error:
        return place(error)
    assert all(math.isfinite(value) for value in values.values() if isinstance(value, float))
    return tuple(values)


def _flags(data: bytes) -> Hashable:
    """Each setting's own text, as on the command line."""
    text = data.decode("utf-8", "replace")
    told: list[object] = []
    for option in options():
        try:
            value = option.read(text, option.flag, text=True)
            told.append(math.isfinite(value) if isinstance(value, float) else type(value).__name__)
        except SettingsError as error:
            told.append(option.flag in str(error))
    assert False not in told
    return tuple(told)


def _specs(data: bytes) -> Hashable:
    """ValueError, and nothing else; an address that is taken can be connected to."""
    return tuple(_spec(read, data.decode("utf-8", "replace")) for read in (read_workers, read_store, read_arms))


def _spec(read: Callable[[str], object], text: str) -> Hashable:
    try:
        found = read(text)
    except ValueError as error:
        return place(error)
    for spec in found if isinstance(found, tuple) else (found,):
        if isinstance(spec, WorkerSpec | StoreSpec):
            assert parse_address(spec.url).host
    return len(found) if isinstance(found, tuple) else type(found).__name__


def _files() -> list[bytes]:
    extra = [
        b"worker: http://a:1\nstore: {url: 'http://b:2', tp: 2}\nab: kv:90,random:10\nseed: 5\n",
        b"a: &x [1]\nb: *x\n",
        b"? [port]\n: 1\n",
        b"drain_timeout: 5\nrouter_temperature: 0.5\nttft_slo: 1\n",
        b"worker: [{url: http://a, block_size: 16, events: 'tcp://a:1', store: false}]\nkv_events: no\n",
    ]
    configs = [line for path in _CONFIGS.glob("*.yaml") for line in path.read_bytes().split(b"\n\n")]
    return [*(part for part in sorted(configs) if len(part) < _LARGEST), *extra]


def _texts() -> list[bytes]:
    return [
        b"http://10.0.0.7:8000,name=a,block_size=16 https://[::1]/x",
        b"http://a:8000,events=tcp://a:5557,replay=tcp://a:5558,role=prefill,connector=nixl,bootstrap_port=8998,host=h",
        b"http://m:9003,model=m,hash=sha256_cbor,tp=2,pp=1,block_size=16,budget_ms=2.5",
        b"kv:90,round-robin:10,kv/overlap:5",
        b"64MiB",
        b"none",
        b"0.5",
        b"inf",
    ]


_WORDS = (
    b"worker:", b"- ", b"  ", b"\n", b": ", b"{", b"}", b"[", b"]", b"&x ", b"*x", b"<<: ", b"? ", b"!!binary ",
    b"!!int ", b"!!bool ", b"!!timestamp ", b"!!set ", b"!!omap ", b"!!python/name:os.system ", b"!x ", b"2001-99-99",
    b"2001-01-01", b"1:30:60", b".inf", b".nan", b"0x", b"0b", b"'", b'"', b'"\\x', b"|\n", b">\n", b"#",
    b"%YAML 9.9\n", b"---\n", b"\xef\xbb\xbf", b"\xff", b"\x00", b"[" * 300, b"9" * 4400, b"http://", b"[::1]",
    b":99999", b"@", b",role=decode", b",tp=", b"auto", b"KiB", b"kv:", b"/", b"=", "²٣".encode(), b"name=",
    b"\xe2\x80\xa8",
)  # fmt: skip

TARGETS = (
    Target("settings-file", _file, _files, _WORDS, share=10, largest=_LARGEST),
    Target("settings-flags", _flags, _texts, _WORDS, share=20),
    Target("specs", _specs, _texts, _WORDS),
)
