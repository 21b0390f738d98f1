"""The ways in which a booking of a prefill comes to its end."""

from __future__ import annotations

from typing import Literal, get_args

from router.scheduling.booking import Booking

Ending = Literal["first token", "assumed", "none"]
ENDINGS = get_args(Ending)


def end(booking: Booking, ending: Ending, now: float) -> None:
    if ending == "first token":
        booking.first_token(now)
    elif ending == "assumed":
        booking.assume_first_token(now)
    else:
        booking.release(now)
