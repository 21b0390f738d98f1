"""The order of one engine rank's messages, as a state machine without sockets: stimuli in, instructions out.

An engine numbers its messages from 0 in each of its processes and keeps the last few for replay. Live messages of one
connection never repeat and never go back, so a number that does is another process speaking. A connection that was
lost and is there again is doubt enough: a new process may have counted up to the very number that is expected next.
Replays come over another socket and overlap with what is live.

    Connected              -> AskReplay(0), and NewEpoch before it unless it is the first
    Live, expected         -> Apply
    Live, beyond           -> held, AskReplay(what is missing)
    Live, replayed already -> nothing
    Live, going back       -> NewEpoch, AskReplay(0)
    Replayed               -> Apply, in order
    ReplayEnded            -> nothing; AskReplay again while that brings anything; else LoseTrack and go on
    Unanswered             -> AskReplay again, TRIES times if the engine speaks meanwhile, else until it does
"""

from __future__ import annotations

from typing import NamedTuple

HOLD_LIMIT = 20_000
"""Messages held while earlier ones are missing; those beyond are asked for again."""
TRIES = 3
"""Replays that an engine which publishes may leave unanswered before it is believed to have none."""


class Connected(NamedTuple):
    """Subscribed: whatever is published from now on arrives."""


class Disconnected(NamedTuple):
    """Nothing arrives until the next Connected, which is when it counts."""


class Live(NamedTuple):
    seq: int
    payload: bytes


class Replayed(NamedTuple):
    seq: int
    payload: bytes


class ReplayEnded(NamedTuple):
    """The last AskReplay is over; `complete` is False when there is nobody to ask."""

    complete: bool


class Unanswered(NamedTuple):
    """The last AskReplay brings nothing, or nothing more."""


Stimulus = Connected | Disconnected | Live | Replayed | ReplayEnded | Unanswered


class Apply(NamedTuple):
    payload: bytes


class AskReplay(NamedTuple):
    """Ask for everything from `start` on; a replay still under way is of no more use."""

    start: int


class NewEpoch(NamedTuple):
    """Forget everything: another process speaks, or may be."""


class LoseTrack(NamedTuple):
    """Messages before the next Apply are missing for good."""


Instruction = Apply | AskReplay | NewEpoch | LoseTrack


class ZmqSequence:
    def __init__(self, hold_limit: int = HOLD_LIMIT) -> None:
        self._hold_limit = hold_limit
        self._ever_connected = False
        self._reset()

    def __repr__(self) -> str:
        asked = "" if self._asked is None else f", replay from {self._asked}"
        return f"ZmqSequence(next {self._next}, {len(self._held)} held{asked})"

    @property
    def caught_up(self) -> bool:
        """Nothing is known to be on its way, or missing: what is missing is asked for at once."""
        return self._asked is None

    def handle(self, stimulus: Stimulus) -> list[Instruction]:
        match stimulus:
            case Connected():
                return self._connected()
            case Disconnected():
                return []
            case Live():
                return self._live(stimulus)
            case Replayed(seq, payload):
                return self._replayed(seq, payload)
            case ReplayEnded(complete):
                return self._replay_ended(complete)
            case Unanswered():
                return self._unanswered()

    def _reset(self) -> None:
        self._next = 0
        self._held: dict[int, bytes] = {}
        self._highest = -1
        """The last number known to exist; all up to it are applied, held or missing."""
        self._last_live: Live | None = None
        self._asked: int | None = 0
        """Where the replay under way began. One from 0 is due from the very start."""
        self._answered = False
        """Whether that replay has brought anything yet."""
        self._tries = 0
        """Replays in a row that brought nothing."""
        self._spoken = False
        """A live message has come since the last was asked for."""

    def _connected(self) -> list[Instruction]:
        if self._ever_connected:
            return self._begin_anew()
        self._ever_connected = True
        return [AskReplay(0)]

    def _begin_anew(self) -> list[Instruction]:
        self._reset()
        return [NewEpoch(), AskReplay(0)]

    def _live(self, live: Live) -> list[Instruction]:
        last, self._last_live = self._last_live, live
        self._spoken = True
        if last == live:
            return []
        if last is not None and live.seq <= last.seq:
            instructions = self._begin_anew()
            self._last_live = live
            self._hold(live.seq, live.payload)
            return instructions + self._drain()
        self._hold(live.seq, live.payload)
        return self._drain() + self._ask_if_missing()

    def _replayed(self, seq: int, payload: bytes) -> list[Instruction]:
        if self._asked is None:
            return []
        first, self._answered = not self._answered, True
        self._tries = 0
        # An engine answers in order, so one that begins later than asked has kept nothing earlier.
        lost = self._jump(seq) if first and seq > self._next else []
        self._hold(seq, payload)
        return lost + self._drain()

    def _replay_ended(self, complete: bool) -> list[Instruction]:
        if self._asked is None:
            return []
        brought_something = self._next > self._asked
        self._asked = None
        if complete and not self._missing:
            return []
        return self._ask() if brought_something else self._give_up()

    def _unanswered(self) -> list[Instruction]:
        """An engine that stands still is silent everywhere; what it goes on with is worth waiting for."""
        if self._asked is None:
            return []
        self._tries += 1
        return self._give_up() if self._spoken and self._tries >= TRIES else self._ask()

    def _give_up(self) -> list[Instruction]:
        """Nobody has what is missing, if anything is."""
        self._asked = None
        if self._next and not self._missing:
            return []
        lost = self._jump(self._highest + 1)
        return lost + self._drain() + self._ask_if_missing()

    def _jump(self, seq: int) -> list[Instruction]:
        """Give up on what is missing before the first message that is there: a held one, or `seq`."""
        self._next = min([*self._held, seq])
        return [LoseTrack()]

    def _hold(self, seq: int, payload: bytes) -> None:
        if seq < self._next:
            return
        self._highest = max(self._highest, seq)
        if len(self._held) < self._hold_limit or seq == self._next:
            self._held.setdefault(seq, payload)

    def _drain(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        while (payload := self._held.pop(self._next, None)) is not None:
            instructions.append(Apply(payload))
            self._next += 1
        return instructions

    @property
    def _missing(self) -> bool:
        return self._highest >= self._next

    def _ask_if_missing(self) -> list[Instruction]:
        return self._ask() if self._missing and self._asked is None else []

    def _ask(self) -> list[Instruction]:
        self._asked, self._answered, self._spoken = self._next, False, False
        return [AskReplay(self._next)]
