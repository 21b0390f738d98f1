"""Which policy a setting means, from what is built in and from what is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.__main__ import main
from router.policies import BUILT_IN, make_policy
from router.scheduling.balance import LeastLoaded, PowerOfTwo, Random, RoundRobin
from router.scheduling.decision import Cost, Policy, Situation
from router.settings import Settings, SettingsError
from tests.router.scheduling.candidates import Scripted, costs_of, named, situation


def made(**settings: Any) -> Policy:
    return make_policy(Settings(**settings))


def costs(policy: Policy) -> list[float]:
    """Of a rank with the prompt's half and work before it, and of an idle one without."""
    two = situation(
        named("ab"),
        100,
        requests=[2, 0],
        pending=[40, 0],
        active=[300, 0],
        overlap=[50, 0],
        queue=[0.5, 0.0],
        prefill=[0.25, 1.0],
        step=[0.01, 0.01],
    )
    return costs_of(policy.choose(two, Scripted([0.5] * 2)))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("round-robin", RoundRobin),
        ("random", Random),
        ("least-loaded", LeastLoaded),
        ("power-of-two", PowerOfTwo),
        ("direct", LeastLoaded),
    ],
)
def test_each_mode_has_its_policy(mode: str, kind: type) -> None:
    assert type(made(router_mode=mode)) is kind
    assert type(made(router_mode=mode, kv_policy="nonsense")) is kind, "which kv mode alone reads"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("overlap", [90 + 300, 100]), ("lmetric", [90 * 3, 100]), ("ttft", [0.76, 1.01])],
)
def test_each_name_has_its_costs(name: str, expected: list[float]) -> None:
    assert costs(made(kv_policy=name)) == pytest.approx(expected)


def test_without_a_name_it_is_auto() -> None:
    assert costs(made()) == costs(made(kv_policy="auto"))
    assert all(costs(made()) != costs(made(kv_policy=name)) for name in BUILT_IN if name != "auto")


@pytest.mark.parametrize("name", [{}, {"kv_policy": "overlap"}, {"kv_policy": "auto"}])
def test_a_weight_means_overlap(name: dict[str, str]) -> None:
    assert costs(made(kv_overlap_score_weight=2.0, **name)) == [2 * 90 + 300, 2 * 100]
    assert costs(made(kv_overlap_score_weight=0.0, **name)) == [300, 0]


def test_a_weight_is_of_no_other_policy() -> None:
    with pytest.raises(SettingsError, match="belongs to --kv-policy overlap, not to ttft"):
        made(kv_policy="ttft", kv_overlap_score_weight=1.0)


def test_a_policy_has_a_state_of_its_own() -> None:
    assert made() is not made()


def test_an_unknown_policy_is_told_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--worker", "http://127.0.0.1:1", "--kv-policy", "nonsense"]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert all(word in told for word in ("--kv-policy", "nonsense", *BUILT_IN))


# -- of other packages

MODULE = """
import numpy as np

from router.scheduling.decision import Cost


class Longest:
    def cost(self, situation):
        return Cost(-situation.overlap_tokens.astype(np.float64), 1.0)


class Faulty:
    costs = None  # what makes them, of a situation

    def cost(self, situation):
        return Faulty.costs(situation)


def broken():
    raise RuntimeError("no licence")


class Costly:
    costs = {}
"""
ENTRIES = """
[kv_router.policies]
longest = kv_router_test_policy:Longest
broken = kv_router_test_policy:broken
costly = kv_router_test_policy:Costly
faulty = kv_router_test_policy:Faulty
missing = kv_router_test_nowhere:Policy
overlap = kv_router_test_policy:Longest
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip would have installed it."""
    information = tmp_path / "kv_router_test_policy-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-router-test-policy\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "kv_router_test_policy.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_an_installed_policy_is_found_by_its_name() -> None:
    policy = made(kv_policy="longest")
    assert costs(policy) == [-50, 0]
    assert policy.choose(situation(named("ab"), 10, overlap=[3, 8]), Scripted([])).position == 1


@pytest.mark.usefixtures("package")
def test_what_is_built_in_cannot_be_replaced() -> None:
    assert costs(made(kv_policy="overlap")) == [390, 100]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", "no licence"),
        ("missing", "kv_router_test_nowhere"),
        ("costly", "of kv_router_test_policy:Costly is none: Costly has no method `cost`"),
    ],
)
def test_one_that_cannot_be_loaded_says_why(name: str, why: str) -> None:
    with pytest.raises(SettingsError, match=f"--kv-policy {name} .*{why}"):
        made(kv_policy=name)


@pytest.mark.parametrize("name", ["round-robin", "round_robin"])
def test_a_mode_is_not_a_policy_and_told_to_be_one(name: str) -> None:
    """In other routers' terms it is one."""
    with pytest.raises(SettingsError, match=rf"not '{name}'; round-robin is a --router-mode\.$"):
        made(kv_policy=name)


@pytest.mark.usefixtures("package")
def test_installed_ones_are_among_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"overlap, .*longest.*not 'nonsense'"):
        made(kv_policy="nonsense")


# -- that fail


def nan() -> float:
    return float("nan")


def raises(_: Situation) -> Cost:
    raise ValueError("no such table")


FAULTS: dict[str, tuple[Callable[[Situation], Any], str]] = {
    "raises": (raises, "it raised ValueError('no such table') (kv_router_test_policy.py, line "),
    "NaN": (lambda _: Cost(np.array([1.0, nan()]), 1.0), "1 of its 2 costs are NaN"),
    "too few": (lambda _: Cost(np.array([1.0]), 1.0), "shape (1,), and there are 2 candidates"),
    "too many": (lambda _: Cost(np.zeros(3), 1.0), "shape (3,), and there are 2 candidates"),
    "one number": (lambda _: Cost(np.array(3.0), 1.0), "shape (), and"),
    "no cost": (lambda _: None, "no Cost: 'NoneType' object has no attribute 'values'"),
    "no numbers": (lambda _: Cost(np.array(["a", "b"]), 1.0), "no Cost: could not convert string to float"),
    "NaN for the prompt": (lambda _: Cost(np.zeros(2), nan()), "cost of the whole prompt is NaN"),
    "none for the prompt": (lambda _: Cost(np.zeros(2), None), "no Cost: float() argument must be"),  # type: ignore[arg-type]
    "too few open": (lambda _: Cost(np.zeros(2), 1.0, np.array([True])), "open has the shape (1,)"),
}


@pytest.fixture
def faulty(package: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Situation], Any]], None]:
    """Says what the policy `faulty` answers."""
    kind = importlib.import_module("kv_router_test_policy").Faulty
    return lambda answer: monkeypatch.setattr(kind, "costs", staticmethod(answer))


Answering = Callable[[Callable[[Situation], Any]], None]


@pytest.mark.parametrize(("answer", "fault"), FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_that_fails_costs_no_request_and_is_told_of(
    answer: Callable[[Situation], Any],
    fault: str,
    temperature: float,
    faulty: Answering,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty(answer)
    policy = made(kv_policy="faulty", router_temperature=temperature)
    for _ in range(3):
        assert costs(policy) == [390, 100]
    (record,) = caplog.records
    fields = vars(record)["fields"]
    assert (record.levelname, fields["policy"]) == ("ERROR", "faulty")
    assert fault in str(fields["fault"])


def test_it_is_told_of_once_a_minute(faulty: Answering, caplog: pytest.LogCaptureFixture) -> None:
    faulty(raises)
    policy = made(kv_policy="faulty")
    for now in range(0, 150, 10):
        policy.choose(situation(named("ab"), 10, now=float(now)), Scripted([0.5]))
    assert [vars(record)["fields"]["faults"] for record in caplog.records] == [1, 7, 13]


def test_one_that_answers_again_is_heard_again(faulty: Answering) -> None:
    policy = made(kv_policy="faulty")
    faulty(raises)
    assert costs(policy) == [390, 100]
    faulty(lambda _: Cost([3, 4], 1.0))  # type: ignore[arg-type]
    assert costs(policy) == [3, 4]


def test_a_simulation_of_one_that_fails_says_so(faulty: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    faulty(raises)
    asked = ["simulate", "--workload", "rag", "--limit", "5", "--jobs", "1", "--policies", "faulty"]
    assert main(asked) == 2
    told = (
        "kv-router simulate: the policy faulty: it raised ValueError('no such table') (kv_router_test_policy.py, line "
    )
    assert capsys.readouterr().err.startswith(told)
