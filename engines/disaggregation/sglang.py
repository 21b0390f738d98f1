"""SGLang's disaggregation: both legs are sent at once with the same bootstrap host, port and room.

As SGLang 0.5.23 has it (srt/managers/io_struct.py, srt/disaggregation): a list of rooms has one for each prompt.
Several answers to a prompt all get its one room, up to 0.5.23 (srt/managers/tokenizer_manager.py): only one is sent its
KV, and the others wait for it, or go on without (sgl-project/sglang#24223, #26486). A prefill worker of several
data-parallel ranks takes the rank that the room leaves as a remainder, unless told otherwise.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engines.disaggregation.legs import (
    PROBABILITIES_OF_PROMPT,
    Body,
    Connector,
    Handover,
    count_of,
    probabilities_of_prompt,
    prompts_in,
    raw,
    samplings,
    value_of,
)
from engines.endpoints import url_host

BOOTSTRAP_PORT = 8998
"""SGLang's default of --disaggregation-bootstrap-port."""
_LARGEST_ROOM = 2**63 - 1


class Sglang(Connector):
    pushes = True

    def refuses(self, body: Body, room: int | None = None) -> str | None:  # noqa: ARG002 -- a Connector
        if max(_answers_wanted(body)) > 1:
            return "it asks for several answers (n) or beams, which SGLang gives one bootstrap room"
        if value_of(body, "return_logprob") and is_in_prompt(value_of(body, "logprob_start_len")):
            return PROBABILITIES_OF_PROMPT
        return probabilities_of_prompt(body)

    def prefill(self, body: Body, handover: Handover) -> Body:
        """The engine itself stops after the first token; in one piece its answer tells what was cached."""
        whole = {name: value for name, value in body.items() if name != "stream_options"}
        return {**whole, **_bootstrap(body, handover), "stream": raw(False)}

    def decode(self, body: Body, handover: Handover, returned: msgspec.Raw | None) -> Body:  # noqa: ARG002
        prefiller = handover.prefiller
        rank = {"disagg_prefill_dp_rank": raw(prefiller.dp_rank)} if prefiller.dp_size > 1 else {}
        return {**body, **_bootstrap(body, handover), **rank}


def _answers_wanted(body: Body) -> list[int]:
    """How many answers the request wants for each prompt, wherever it says so: /generate has it among the sampling
    parameters, of which there may be a list."""
    sampled = [params.get(name) for params in samplings(body) for name in ("n", "beam_width")]
    wanted = [count_of(body, "n"), *(n for n in sampled if isinstance(n, int | float))]
    return [int(n or 1) for n in wanted]


def is_in_prompt(start: object) -> bool:
    """Where /generate's log probabilities begin, or a list of that: -1 stands for the prompt's end."""
    return any(isinstance(each, int) and each >= 0 for each in (start if isinstance(start, list) else [start]))


def _bootstrap(body: Body, handover: Handover) -> Body:
    prefiller, prompts = handover.prefiller, prompts_in(body)
    size = prefiller.dp_size
    rooms = [_room(handover.number + number, prefiller.dp_rank, size) for number in range(0, prompts * size, size)]
    port = prefiller.bootstrap_port or BOOTSTRAP_PORT
    fields: dict[str, list[Any]] = {
        "bootstrap_host": [url_host(prefiller.host)] * prompts,
        "bootstrap_port": [port] * prompts,
        "bootstrap_room": rooms,
    }
    return {name: raw(values if prompts > 1 else values[0]) for name, values in fields.items()}


def _room(number: int, dp_rank: int, dp_size: int) -> int:
    """A bootstrap room near `number` whose remainder by `dp_size` is the rank."""
    within = number % (_LARGEST_ROOM - dp_size)
    return within - within % dp_size + dp_rank
