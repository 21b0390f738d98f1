"""How long it takes to move KV from one rank to another, learned online."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from router.scheduling.candidates import Figures, Seconds

_BASE: Final = 0.005
"""Seconds: a handshake, and one step of the receiving engine."""
_PER_TOKEN: Final = 131_072 / 12.5e9
"""Seconds per token: 131 kB, as for an 8B model with grouped-query attention, over 100 Gbit/s. Only the order of
magnitude matters."""
_GAIN: Final = 0.1
"""Weight of one observation in the logarithm of a factor; the n-th weighs 1/(n + 1) if that is more."""
_OUTLIER: Final = 4.0
"""Observations are clipped to this factor from what was expected, either way; the first `_FEW` to its square, as the
prior may be far off."""
_FEW: Final = 4
"""Observations."""
_LASTS: Final = 600.0
"""Seconds after which the logarithm of a factor is 1/e of what it was, if nothing was observed since: where transfers
seem to take long requests are served whole, and nobody could ever show that they do not, or do no more."""
_LEAST, _MOST = 1e-3, 1e4
"""Limits of a factor, beyond any hardware: nothing observed may take it where it hardly comes back from."""

Near = npt.NDArray[np.bool_]


def prior_seconds(tokens: Figures | Seconds, hidden: float = 0.0) -> Seconds:
    """Seconds to transfer `tokens`. `hidden`: seconds of the transfer that can overlap with the prefill."""
    seconds: Seconds = _BASE + np.maximum(0.0, tokens * _PER_TOKEN - hidden)
    return seconds


class Transfers:
    """Observed over prior seconds: one factor for ranks on the same host, one for others. `now` is in seconds on a
    steady clock."""

    def __init__(self) -> None:
        self._logarithms = np.zeros(2)
        self._at = np.zeros(2)
        """When each factor was last observed."""
        self._observed = [0, 0]

    def factors(self, near: Near, now: float) -> Seconds:
        both: Seconds = np.exp(self._logarithms * np.exp(np.minimum(0.0, self._at - now) / _LASTS))
        return both[near.astype(np.intp)]

    def observe(self, near: bool, work: float, seconds: float, now: float) -> None:
        """A transfer that takes `work` seconds by the prior took `seconds`."""
        place = int(near)
        count = self._observed[place]
        known = self.factors(np.array([near]), now).item()
        most = _OUTLIER if count >= _FEW else _OUTLIER**2
        ratio = min(max(seconds / (work * known), 1 / most), most)
        self._observed[place] = count + 1
        gain = max(_GAIN, 1 / (count + 2))
        found = math.log(known) + gain * math.log(ratio)
        self._logarithms[place] = min(max(found, math.log(_LEAST)), math.log(_MOST))
        self._at[place] = now
