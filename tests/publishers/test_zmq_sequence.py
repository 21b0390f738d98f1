from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from publishers.zmq_sequence import (
    TRIES,
    Apply,
    AskReplay,
    Connected,
    Instruction,
    Live,
    LoseTrack,
    NewEpoch,
    Replayed,
    ReplayEnded,
    Stimulus,
    Unanswered,
    ZmqSequence,
)
from tests.examples import examples


def p(seq: int, process: str = "a") -> bytes:
    return f"{process}{seq}".encode()


def live(seq: int, process: str = "a") -> Live:
    return Live(seq, p(seq, process))


def replayed(seq: int, process: str = "a") -> Replayed:
    return Replayed(seq, p(seq, process))


def apply(*seqs: int, process: str = "a") -> list[Instruction]:
    return [Apply(p(seq, process)) for seq in seqs]


END, BROKEN = ReplayEnded(complete=True), ReplayEnded(complete=False)

Script = list[tuple[Stimulus, list[Instruction]]]
UNANSWERED: tuple[Stimulus, list[Instruction]] = (Unanswered(), [AskReplay(0)])

FRESH: Script = [(Connected(), [AskReplay(0)]), (END, [])]
AT_3: Script = [*FRESH, (live(0), apply(0)), (live(1), apply(1)), (live(2), apply(2))]

SCRIPTS: dict[str, Script] = {
    "an engine that has said nothing yet": [*FRESH, (live(0), apply(0)), (live(1), apply(1))],
    "an engine that has run for a while": [
        (Connected(), [AskReplay(0)]),
        (replayed(0), apply(0)),
        (replayed(1), apply(1)),
        (END, []),
        (live(2), apply(2)),
    ],
    "live messages during the first replay wait for it": [
        (live(2), []),
        (Connected(), [AskReplay(0)]),
        (live(3), []),
        (replayed(0), apply(0)),
        (replayed(1), apply(1, 2, 3)),
        (replayed(2), []),
        (replayed(3), []),
        (END, []),
        (live(4), apply(4)),
    ],
    "what was replayed may still come live": [
        (Connected(), [AskReplay(0)]),
        (replayed(0), apply(0)),
        (replayed(1), apply(1)),
        (END, []),
        (live(0), []),
        (live(1), []),
        (live(2), apply(2)),
        (live(4), [AskReplay(3)]),
        (BROKEN, [LoseTrack(), *apply(4)]),
    ],
    "a message delivered twice": [*AT_3, (live(2), []), (live(3), apply(3))],
    "a gap is replayed, and what comes meanwhile waits": [
        *AT_3,
        (live(5), [AskReplay(3)]),
        (live(6), []),
        (replayed(3), apply(3)),
        (replayed(4), apply(4, 5, 6)),
        (replayed(5), []),
        (END, []),
        (live(7), apply(7)),
    ],
    "a gap that can no longer be replayed": [
        *AT_3,
        (live(6), [AskReplay(3)]),
        (live(7), []),
        (replayed(5), [LoseTrack(), *apply(5, 6, 7)]),
        (END, []),
        (live(8), apply(8)),
    ],
    "a gap and nobody to ask": [
        *AT_3,
        (live(5), [AskReplay(3)]),
        (BROKEN, [LoseTrack(), *apply(5)]),
        (live(6), apply(6)),
    ],
    "two gaps, one after the other": [
        *AT_3,
        (live(4), [AskReplay(3)]),
        (live(6), []),
        (replayed(3), apply(3, 4)),
        (END, [AskReplay(5)]),
        (replayed(5), apply(5, 6)),
        (END, []),
    ],
    "two gaps and nobody to ask": [
        *AT_3,
        (live(4), [AskReplay(3)]),
        (live(6), []),
        (BROKEN, [LoseTrack(), *apply(4), AskReplay(5)]),
        (BROKEN, [LoseTrack(), *apply(6)]),
        (live(7), apply(7)),
    ],
    "a first replay that begins late": [
        (Connected(), [AskReplay(0)]),
        (replayed(7), [LoseTrack(), *apply(7)]),
        (replayed(8), apply(8)),
        (END, []),
        (live(9), apply(9)),
    ],
    "a first replay that nobody answers": [
        (Connected(), [AskReplay(0)]),
        (BROKEN, [LoseTrack()]),
        (live(0), apply(0)),
    ],
    "a replay that breaks off is taken up where it stopped": [
        (Connected(), [AskReplay(0)]),
        (replayed(0), apply(0)),
        (BROKEN, [AskReplay(1)]),
        (replayed(1), apply(1)),
        (END, []),
        (live(2), apply(2)),
    ],
    "an engine that stands still is asked until it goes on": [
        (Connected(), [AskReplay(0)]),
        *[UNANSWERED] * 9,
        (replayed(0), apply(0)),
        (Unanswered(), [AskReplay(1)]),
        (live(2), []),
        (Unanswered(), [AskReplay(1)]),
        (replayed(1), apply(1, 2)),
        (END, []),
    ],
    "an engine that publishes and answers no replay": [
        (Connected(), [AskReplay(0)]),
        (live(2), []),
        (Unanswered(), [AskReplay(0)]),
        (Unanswered(), [AskReplay(0)]),
        (Unanswered(), [AskReplay(0)]),
        (live(3), []),
        (Unanswered(), [LoseTrack(), *apply(2, 3)]),
        (live(4), apply(4)),
        (Unanswered(), []),
        (live(6), [AskReplay(5)]),
    ],
    "while an engine publishes on, it is asked so many times and no more": [
        (Connected(), [AskReplay(0)]),
        *[each for seq in range(1, TRIES) for each in [(live(seq), []), UNANSWERED]],
        (live(TRIES), []),
        (Unanswered(), [LoseTrack(), *apply(*range(1, TRIES + 1))]),
    ],
    "an unanswered replay of which nothing is missing": [
        (Connected(), [AskReplay(0)]),
        (live(0), apply(0)),
        (Unanswered(), [AskReplay(1)]),
        (Unanswered(), [AskReplay(1)]),
        (live(1), apply(1)),
        (Unanswered(), []),
        (live(2), apply(2)),
    ],
    "a replay with a hole is asked for again": [
        (Connected(), [AskReplay(0)]),
        (replayed(0), apply(0)),
        (replayed(2), []),
        (END, [AskReplay(1)]),
        (replayed(1), apply(1, 2)),
        (END, []),
    ],
    "going back is another process": [
        *AT_3,
        (live(1, "b"), [NewEpoch(), AskReplay(0)]),
        (live(2, "b"), []),
        (replayed(0, "b"), apply(0, 1, 2, process="b")),
        (END, []),
        (live(3, "b"), apply(3, process="b")),
    ],
    "going back to 0 leaves nothing to wait for": [
        *AT_3,
        (live(0, "b"), [NewEpoch(), AskReplay(0), *apply(0, process="b")]),
        (live(1, "b"), apply(1, process="b")),
        (live(0, "c"), [NewEpoch(), AskReplay(0), *apply(0, process="c")]),
        (live(0, "d"), [NewEpoch(), AskReplay(0), *apply(0, process="d")]),
    ],
    "the same number with another content is another process": [*AT_3, (live(2, "b"), [NewEpoch(), AskReplay(0)])],
    "going back during a replay ends it": [
        *AT_3,
        (live(5), [AskReplay(3)]),
        (live(1, "b"), [NewEpoch(), AskReplay(0)]),
        (replayed(0, "b"), apply(0, 1, process="b")),
        (END, []),
    ],
    "a reconnect is doubt, even where the numbers line up": [
        *AT_3,
        (Connected(), [NewEpoch(), AskReplay(0)]),
        (live(3, "b"), []),
        (replayed(0, "b"), apply(0, process="b")),
        (replayed(1, "b"), apply(1, process="b")),
        (replayed(2, "b"), apply(2, 3, process="b")),
        (END, []),
    ],
    "a number from nowhere is survived": [
        *AT_3,
        (Live(2**64 - 2, b"?"), [AskReplay(3)]),
        (END, [LoseTrack(), Apply(b"?")]),
        (live(3), [NewEpoch(), AskReplay(0)]),
    ],
    "an answer that nobody waits for": [*AT_3, (replayed(3), []), (Unanswered(), []), (END, []), (live(3), apply(3))],
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_script(script: Script) -> None:
    sequence = ZmqSequence()
    for step, (stimulus, instructions) in enumerate(script):
        assert sequence.handle(stimulus) == instructions, f"step {step}: {stimulus}"


def test_a_flood_during_a_replay_is_bounded_and_asked_for_again() -> None:
    sequence = ZmqSequence(hold_limit=3)
    sequence.handle(Connected())
    for seq in range(10, 14):
        assert sequence.handle(live(seq)) == []
    assert len(sequence._held) == 3
    applied = [one for seq in range(10) for one in sequence.handle(replayed(seq))]
    assert applied == apply(*range(13))
    assert sequence.handle(END) == [AskReplay(13)]


class EngineAndNetwork(RuleBasedStateMachine):
    """An engine that may restart, a network that loses what it likes, and a plain model of what must come out."""

    unnoticed = False
    """A restart whose lost connection has not been reported yet."""

    @initialize(buffer=st.integers(1, 12), hold=st.integers(1, 8))
    def begin(self, buffer: int, hold: int) -> None:
        self.buffer = buffer
        self.sequence = ZmqSequence(hold)
        self.process = 0
        self.published: list[bytes] = []
        self.applied: list[bytes] = []
        self.exact = True
        self.broken_off = False
        self.asked: int | None = None
        self.unanswered = 0
        self.feed(Connected())

    def feed(self, stimulus: Stimulus) -> None:
        for instruction in self.sequence.handle(stimulus):
            match instruction:
                case Apply(payload):
                    self.applied.append(payload)
                case AskReplay(start):
                    self.asked = start
                    self.spoken = False
                case NewEpoch():
                    self.applied, self.exact, self.broken_off = [], True, False
                case LoseTrack():
                    self.exact = False

    @rule(arrives=st.booleans())
    def publish(self, arrives: bool) -> None:
        seq = len(self.published)
        self.published.append(b"%d/%d" % (self.process, seq))
        if arrives:
            self.spoken = True
            self.feed(Live(seq, self.published[seq]))

    @rule(unseen=st.integers(0, 4), noticed=st.booleans())
    def restart(self, unseen: int, noticed: bool) -> None:
        self.process += 1
        self.published = [b"%d/%d" % (self.process, seq) for seq in range(unseen)]
        self.unnoticed = True
        if noticed:
            self.reconnect()

    @rule()
    def reconnect(self) -> None:
        self.unnoticed = False
        self.feed(Connected())

    @precondition(lambda self: self.asked is not None)
    @rule(answers=st.integers(0, 12), answered=st.booleans())
    def answer(self, answers: int, answered: bool) -> None:
        """Serves the replay as the engine does now; only the first few arrive, with an end mark or without."""
        self.serve(self.published if answered else self.published[:answers], answered)

    @precondition(lambda self: self.asked is not None)
    @rule()
    def answer_nothing(self) -> None:
        """It is only given up after TRIES, and never while the engine is silent."""
        self.unanswered += 1
        silent, self.asked = not self.spoken, None
        self.feed(Unanswered())
        may_give_up = self.unanswered >= TRIES and not silent
        assert self.asked is not None or may_give_up
        self.broken_off |= may_give_up

    def serve(self, upto: list[bytes], complete: bool) -> None:
        assert self.asked is not None
        first = max(self.asked, len(self.published) - self.buffer)
        self.asked = None
        self.broken_off |= not complete
        for seq in range(first, len(upto)):
            self.unanswered = 0
            self.feed(Replayed(seq, upto[seq]))
        self.feed(ReplayEnded(complete))

    @invariant()
    def applied_in_order_from_one_process(self) -> None:
        if not hasattr(self, "applied") or self.unnoticed:
            return
        numbers = [int(payload.split(b"/")[1]) for payload in self.applied]
        assert numbers == sorted(set(numbers))
        assert {payload.split(b"/")[0] for payload in self.applied} <= {b"%d" % self.process}

    @invariant()
    def what_is_missing_is_asked_for(self) -> None:
        if hasattr(self, "sequence"):
            assert self.sequence.caught_up is (self.asked is None)
            assert not (self.sequence.caught_up and self.sequence._missing)

    @invariant()
    def exact_means_complete_so_far(self) -> None:
        if hasattr(self, "exact") and self.exact and not self.unnoticed:
            assert self.applied == self.published[: len(self.applied)]

    def teardown(self) -> None:
        """Once the network behaves, the next message brings everything that the engine still has."""
        if not hasattr(self, "published"):
            return
        if self.unnoticed:
            self.reconnect()
        self.publish(arrives=True)
        for _ in range(1000):
            if self.asked is None:
                break
            self.serve(self.published, complete=True)
        assert self.asked is None
        # A replay that broke off or was given up is not asked for again, so only the newest message is certain then.
        still_there = self.published[-1 if self.broken_off else -self.buffer :]
        assert self.applied[-len(still_there) :] == still_there
        if self.exact:
            assert self.applied == self.published


TestEngineAndNetwork = EngineAndNetwork.TestCase
TestEngineAndNetwork.settings = settings(max_examples=examples(100), stateful_step_count=20, deadline=None)
