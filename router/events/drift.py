"""Decides whether the index has drifted from what one rank's engine reports: a state machine without a clock.

The drift is a ratio of two decaying sums over the requests compared: tokens by which the index was off, to prompt
tokens. If it stays above a limit for long enough, the rank's part of the index is wrong. An alarm is raised, and the
part is to be rebuilt: first from its publisher's snapshot and, if it then still has blocks that are gone, from nothing.
"""

from __future__ import annotations

from typing import Final, Literal

LIMIT: Final = 0.1
"""Of prompt tokens, and of requests: a few long prompts make no drift. Below it lies what cannot be told from drift:
events that were longer under way than anybody waits for them, requests that an engine serves without a look at its
cache and that do not show it (most that ask for the prompt's logprobs do)."""
LEAST_REQUESTS: Final = 50
LEAST_SECONDS: Final = 30.0
"""Least time above the limit: far longer than a replay takes to put right what was lost."""
COOL_DOWN: Final = 300.0
"""Seconds from one alarm's last rebuild to the next one's first; and without requests after which an alarm is over."""
_KEEP: Final = 0.99
"""By how much each later request makes an earlier one count less: the last hundred or so decide."""

Step = Literal["rebuild", "relearn"]
"""Ask the publisher for everything; or, if that did not help, forget everything and go on from there."""


class Drift:
    """The drift of one rank. `now`: seconds on a steady clock. A gap is the predicted cached tokens less the reported
    ones."""

    def __init__(self) -> None:
        self.alarm = False
        self.found = 0.0, 0.0
        """Ratio and bias when the alarm was raised."""
        self._rebuilt: float | None = None
        """When the rank's part of the index was last rebuilt or forgotten."""
        self._tried: Step | None = None
        """The last thing that was done for this alarm."""
        self._begin()

    def __repr__(self) -> str:
        return f"<Drift {self.ratio:.3f}, bias {self.bias:+.3f}{', alarm' if self.alarm else ''}>"

    def _begin(self) -> None:
        self.requests = 0
        """Judged since the start or the last rebuild."""
        self._tokens = self._absolute = self._signed = 0.0
        """Prompt tokens, and gaps without and with their sign, summed with decay."""
        self._weight = self._off = 0.0
        """All requests, and those with a gap, counted with the same decay."""
        self._above = 0
        """Requests in a row that found the drift above `LIMIT`."""
        self._above_since = 0.0
        """When the first of these was judged."""

    @property
    def ratio(self) -> float:
        """0-1: how far off the index was, as a share of prompt tokens."""
        return self._absolute / self._tokens if self._tokens else 0.0

    @property
    def bias(self) -> float:
        """The same with its sign: above 0 the index believes in blocks that are gone, below it misses some."""
        return self._signed / self._tokens if self._tokens else 0.0

    def judge(self, gap: int, prompt_tokens: int, now: float) -> Step | None:
        """One request; `gap` 0 where the index was right."""
        self.requests += 1
        self._tokens = _KEEP * self._tokens + prompt_tokens
        self._absolute = _KEEP * self._absolute + abs(gap)
        self._signed = _KEEP * self._signed + gap
        self._weight = _KEEP * self._weight + 1
        self._off = _KEEP * self._off + bool(gap)
        if self.ratio <= LIMIT or self._off <= LIMIT * self._weight:
            self._above = 0
            self.tick(now)
            return None
        if not self._above:
            self._above_since = now
        self._above += 1
        if self._above >= LEAST_REQUESTS and now - self._above_since >= LEAST_SECONDS:
            return self._drifts(now)
        return None

    def tick(self, now: float) -> None:
        """To be called every second: an alarm may end without further requests."""
        if self._above or self.ratio > LIMIT / 2:
            return
        if self.requests >= LEAST_REQUESTS or self._rested(now):
            self.alarm = False

    def _drifts(self, now: float) -> Step | None:
        if not self.alarm:
            self.alarm, self.found, self._tried = True, (self.ratio, self.bias), None
        if self._tried is None and self._rested(now):
            return self._rebuild("rebuild", now)
        if self._tried == "rebuild" and self.bias > 0:  # one that knows too little gains nothing by forgetting
            return self._rebuild("relearn", now)
        return None

    def _rested(self, now: float) -> bool:
        return self._rebuilt is None or now - self._rebuilt >= COOL_DOWN

    def _rebuild(self, step: Step, now: float) -> Step:
        self._tried, self._rebuilt = step, now
        self._begin()
        return step
