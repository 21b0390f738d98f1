from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from router.__main__ import main
from router.arm_spec import ArmMode, ArmSpec, read_arms
from router.arms import SECONDS, Arm, Arms, _point, check_mode, make_arms, reads_prompts
from router.http.messages import RequestHead, request_head
from router.proxy.outcome import Outcome
from router.scheduling.balance import Random, RoundRobin
from router.scheduling.cheapest import Cheapest
from router.scheduling.decision import Decision, Policy
from router.scheduling.overlap import OverlapCost
from router.settings import Settings, SettingsError, options
from router.store.spec import StoreSpec


def head(**headers: str) -> RequestHead:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return request_head(b"POST", b"/v1/completions", named, True, False)


def made(spec: str, **settings: object) -> Arms:
    arms = make_arms(Settings(ab=spec, seed=1, **settings))  # type: ignore[arg-type]
    assert arms
    return arms


@pytest.mark.parametrize(
    ("text", "arms"),
    [
        ("kv:90,round-robin:10", [("kv", "kv", None, 90), ("round-robin", "round-robin", None, 10)]),
        (
            " kv/auto:1 , kv/my.own_policy:0.5",
            [("kv/auto", "kv", "auto", 1), ("kv/my.own_policy", "kv", "my.own_policy", 0.5)],
        ),
        ("kv:1,kv:1,random:2", [("kv", "kv", None, 1), ("kv#2", "kv", None, 1), ("random", "random", None, 2)]),
    ],
)
def test_arms_are_read(text: str, arms: list[tuple[str, ArmMode, str | None, float]]) -> None:
    assert read_arms(text) == tuple(ArmSpec(*arm) for arm in arms)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' has no weight"),
        ("kv", "'kv' has no weight"),
        ("kv:90", "'kv:90' is one arm only"),
        ("kv:90,", "'' has no weight"),
        ("kv:0,random:1", "'kv:0' has no weight above 0"),
        ("kv:-1,random:1", "has no weight above 0"),
        ("kv:inf,random:1", "has no weight above 0"),
        ("kv:nan,random:1", "has no weight above 0"),
        ("kv:x,random:1", "has no weight above 0"),
        ("best:1,random:1", "'best' is no arm; these are: kv, round-robin"),
        ("direct:1,random:1", "'direct' is no arm"),
        ("random/auto:1,kv:1", "only kv has policies"),
        ("kv/:1,random:1", "only kv has policies"),
    ],
)
def test_what_names_no_arms_is_told_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError) as error:
        read_arms(text)
    assert says in str(error.value)
    assert str(error.value).endswith(".")
    (option,) = (option for option in options() if option.flag == "--ab")
    with pytest.raises(SettingsError, match=r"^--ab: "):
        option.read(text, "--ab", text=True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ab": "kv:1,kv/none-such:1"}, "--ab: the arm kv/none-such: --kv-policy takes one of auto"),
        ({"ab": "kv:1,random:1", "router_mode": "direct"}, "--router-mode direct"),
        ({"ab_sticky": "x-session-id"}, "--ab-sticky belongs to --ab"),
    ],
)
def test_a_test_that_cannot_be_made(settings: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        make_arms(Settings(**settings))  # type: ignore[arg-type]


def test_no_test_by_default() -> None:
    assert make_arms(Settings()) is None


def test_each_arm_has_its_policy() -> None:
    """A weight of overlap belongs to the arms that it can mean."""
    arms = made("kv:1,kv/auto:1,kv/overlap:1,round-robin:1,random:1", kv_overlap_score_weight=0.5)
    policies = [arm.policy for arm in arms._arms]
    assert [type(policy) for policy in policies] == [Cheapest, Cheapest, Cheapest, RoundRobin, Random]
    costs = [policy._costs for policy in policies if isinstance(policy, Cheapest)]
    assert [type(cost).__name__ for cost in costs] == ["OverlapCost", "Auto", "OverlapCost"]
    assert all(cost._weight == 0.5 for cost in costs if isinstance(cost, OverlapCost))


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({}, True),
        ({"router_mode": "random"}, False),
        ({"router_mode": "random", "ab": "kv/auto:1,random:1"}, True),
        ({"ab": "round-robin:1,random:1"}, False),
    ],
)
def test_prompts_are_read_if_any_arm_looks_at_them(settings: dict[str, str], reads: bool) -> None:
    assert reads_prompts(Settings(**settings)) is reads  # type: ignore[arg-type]


OF_KV = [
    ("--ttft-slo", {"ttft_slo": 1.0}),
    ("--tbt-slo", {"tbt_slo": 0.1}),
    ("--slo-action", {"slo_action": "queue"}),
    ("--send-token-ids", {"send_token_ids": True}),
    ("--store", {"store": StoreSpec(url="http://10.0.0.5:9003")}),
]


@pytest.mark.parametrize(("flag", "stated"), OF_KV)
@pytest.mark.parametrize("settings", [{"router_mode": "direct"}, {"router_mode": "random", "ab": "random:1,random:1"}])
def test_what_kv_does_is_refused_where_nothing_chooses_by_it(
    flag: str, stated: dict[str, object], settings: dict[str, str]
) -> None:
    with pytest.raises(SettingsError, match=f"{flag} belongs to --router-mode kv, not to {settings['router_mode']}"):
        check_mode(Settings(**settings, **stated))  # type: ignore[arg-type]


@pytest.mark.parametrize(("flag", "stated"), OF_KV)
def test_what_takes_prompts_is_refused_where_no_arm_reads_them(flag: str, stated: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=f"{flag} belongs to --router-mode kv, not to an --ab without an arm of it"):
        check_mode(Settings(ab="round-robin:1,random:1", **stated))  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"router_mode": "random", "ab": "kv:1,random:1"}])
def test_objectives_where_something_does(settings: dict[str, str]) -> None:
    check_mode(Settings(ttft_slo=1.0, tbt_slo=0.1, slo_action="queue", **settings))  # type: ignore[arg-type]
    check_mode(Settings(router_mode="random"))


def test_objectives_are_looked_at_before_the_router_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--worker", "http://127.0.0.1:1", "--router-mode", "random", "--ttft-slo", "1"]) == 2
    assert "--ttft-slo belongs to --router-mode kv" in capsys.readouterr().err


def shares(arms: Arms, heads: list[RequestHead]) -> dict[str, float]:
    counted = Counter(arms.assign(one).name for one in heads)
    return {name: count / len(heads) for name, count in counted.items()}


@pytest.mark.parametrize("sticky", [None, "X-Session-Id"])
def test_requests_are_split_by_weight(sticky: str | None) -> None:
    heads = [head(x_session_id=f"session {number}") for number in range(20_000)]
    found = shares(made("kv:90,round-robin:9,random:1", ab_sticky=sticky), heads)
    assert found == pytest.approx({"kv": 0.9, "round-robin": 0.09, "random": 0.01}, abs=0.01)


@given(value=st.text(st.characters(codec="ascii"), min_size=1), other=st.integers())
def test_a_session_keeps_its_arm(value: str, other: int) -> None:
    """Whatever has been drawn meanwhile, and in another router."""
    one, two = (made("kv:50,random:50", ab_sticky="x-session-id") for _ in range(2))
    first = one.assign(head(x_session_id=value))
    one.assign(head(x_session_id=str(other)))
    one.assign(head())
    assert one.assign(head(x_session_id=value)) is first
    assert two.assign(head(x_session_id=value)).name == first.name


def test_a_session_keeps_its_arm_in_another_process() -> None:
    """Python's own hash of bytes would be another there."""
    script = "from router.arms import _point; print(_point(b'session 1'))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert 0 <= float(told) < 1
    assert told == f"{_point(b'session 1')}\n" == "0.9774892981400178\n"


@pytest.mark.parametrize(
    ("raised", "lowered"),
    [(raised, lowered) for raised in range(3) for lowered in (None, 0, 1, 2) if raised != lowered],
)
def test_an_arm_keeps_its_sessions_when_its_weight_is_raised(raised: int, lowered: int | None) -> None:
    """Wherever it stands, and whether all the others lose sessions to it or one does."""
    weights = [40, 40, 40]
    before = made(_weighted(weights), ab_sticky="x-session-id")
    weights[raised] += 30
    if lowered is not None:
        weights[lowered] -= 30
    after = made(_weighted(weights), ab_sticky="x-session-id")
    heads = [head(x_session_id=str(number)) for number in range(1000)]
    own = before._arms[raised].name
    early = [one for one in heads if before.assign(one).name == own]
    assert len(early) > 250
    assert all(after.assign(one).name == own for one in early)


def _weighted(weights: Sequence[int]) -> str:
    return ",".join(f"{arm}:{weight}" for arm, weight in zip(("kv", "round-robin", "random"), weights, strict=True))


@pytest.mark.parametrize("values", [{}, {"x_session_id": ""}])
def test_without_a_value_an_arm_is_drawn(values: dict[str, str]) -> None:
    arms = made("kv:1,random:1", ab_sticky="x-session-id")
    assert len({arms.assign(head(**values)).name for _ in range(50)}) == 2


class _Edge:
    def random(self) -> float:
        return 1.0


def test_the_upper_edge_is_the_last_arms() -> None:
    arms = [Arm(name, cast("Policy", None)) for name in "ab"]
    assert Arms(arms, [0.1, 0.2], None, _Edge()).assign(head()).name == "b"


class _Decided:
    prompt_tokens, overlap_tokens = 100, 60


def outcome(end: str = "complete", status: int = 200, cached: int | None = 40) -> Outcome:
    first = 0.25 if status < 429 else None
    return Outcome(None, status, end, first, 1.5, 100, cached)  # type: ignore[arg-type]


def page(arms: Arms) -> list[str]:
    registry = CollectorRegistry()
    registry.register(arms)
    return generate_latest(registry).decode().splitlines()


def test_what_an_arms_requests_come_to() -> None:
    arms = made("kv:1,random:1")
    tally = arms._arms[0].tally
    tally.routed(cast("Decision", _Decided()))
    for one in (outcome(), outcome(cached=None), outcome("broken", 502), outcome("failed", 429), outcome(status=404)):
        tally.finished(one)
    text = page(arms)
    for line in (
        'router_ab_requests_total{arm="kv",end="complete"} 3.0',
        'router_ab_requests_total{arm="kv",end="broken"} 1.0',
        'router_ab_first_byte_seconds_count{arm="kv"} 2.0',
        'router_ab_first_byte_seconds_sum{arm="kv"} 0.5',
        'router_ab_request_seconds_sum{arm="kv"} 3.0',
        'router_ab_request_seconds_bucket{arm="kv",le="1.5"} 2.0',
        'router_ab_prompt_tokens_total{arm="kv"} 100.0',
        'router_ab_predicted_cached_tokens_total{arm="kv"} 60.0',
        'router_ab_reported_prompt_tokens_total{arm="kv"} 100.0',
        'router_ab_reported_cached_tokens_total{arm="kv"} 40.0',
        'router_ab_prompt_tokens_total{arm="random"} 0.0',
        # A rate is of what was there before, the first failure's too.
        *(f'router_ab_requests_total{{arm="random",end="{end}"}} 0.0' for end in ("complete", "broken", "failed")),
        'router_ab_requests_total{arm="kv",end="cancelled"} 0.0',
    ):
        assert line in text


def test_buckets_are_narrow_and_reach_far() -> None:
    assert [SECONDS[0], SECONDS[-1]] == pytest.approx([0.001, 1000])
    assert all(1 < after / before < 1.6 for before, after in pairwise(SECONDS))
