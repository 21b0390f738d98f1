"""The sentences for what could not be found out about a worker: what is missing, and the flag that supplies it."""

from __future__ import annotations

from collections.abc import Sequence

NO_ANSWER = "The worker does not answer GET /v1/models: is it running, and is the URL right?"
LATE = (
    "The worker did not answer in time all that it was asked about itself, so some of it counts as unknown; state what "
    "is missing with --worker URL,block_size=N,events=tcp://HOST:PORT."
)
NOT_AN_ENGINE = (
    "The worker answers, but like neither vLLM nor SGLang; state what is needed with "
    "--worker URL,block_size=N,events=tcp://HOST:PORT."
)
NO_MODELS = "GET /v1/models answered no list of models, so it is unknown which models the worker serves."
WANTS_KEY = (
    "GET /v1/models is refused: the engine's API key is missing or wrong, so it is unknown which models the worker "
    "serves; state the right one with --worker-api-key-file FILE."
)
NO_BLOCK_SIZE = "The engine does not tell its block size; state it with --worker URL,block_size=N."
NO_REPLAY = (
    "The engine has no replay endpoint, so events that are lost stay lost; add replay_endpoint to its "
    "--kv-events-config, or state where it is with --worker URL,replay=tcp://HOST:PORT."
)
NO_EVENT_SOURCES = (
    "The engine cannot tell where it publishes KV events (vLLM before 0.31 has no /kv_event_sources); state it with "
    "--worker URL,events=tcp://HOST:PORT."
)
EVENTS_OFF = (
    "The engine publishes no KV events; start it with --kv-events-config (publisher zmq), or state where they are with "
    "--worker URL,events=tcp://HOST:PORT."
)
OLD_EVENTS = (
    "The engine's KV events do not say which prefixes it holds (SGLang before 0.5.6, with --enable-hierarchical-cache "
    "before 0.5.10), so they are not followed; use a newer version."
)
OWN_RANK = (
    "The engine itself chooses the data-parallel rank that serves a request, whatever it is asked (vLLM before 0.11.1, "
    "SGLang before 0.5.10), so cached prefixes are met by chance; use a newer version, or a server for each rank, with "
    "no --data-parallel-size or --dp-size."
)
FOREIGN_ENDPOINT = (
    "The engine names an event endpoint on a host that is not its URL's, which is not followed; allow the host with "
    "--event-host HOST, or state the endpoint with --worker URL,events=tcp://HOST:PORT."
)
BAD_ENDPOINT = (
    "The engine names an event endpoint that nobody can connect to; state a right one with "
    "--worker URL,events=tcp://HOST:PORT."
)

_SETTLED_BY_EVENTS = {NO_EVENT_SOURCES, EVENTS_OFF, FOREIGN_ENDPOINT, BAD_ENDPOINT}


def unsettled(
    told: Sequence[str], *, events: bool, replay: bool, block_size: bool, events_read: bool = True
) -> tuple[str, ...]:
    """Those that an operator has not settled by stating what is missing. `events`: where all ranks publish.
    `events_read`: whether anybody here connects there; else it is no matter where that is."""
    if not events_read:
        told, events, replay = [problem for problem in told if problem != OLD_EVENTS], True, True
    settled = (_SETTLED_BY_EVENTS if events else set()) | ({NO_REPLAY} if replay else set())
    settled |= ({NO_BLOCK_SIZE} if block_size else set()) | ({NOT_AN_ENGINE} if block_size and events else set())
    return tuple(problem for problem in told if problem not in settled)


def several_addresses(host: str, number: int) -> str:
    """What is wrong where a name may lead to another engine with each connection."""
    text = f"The name {host} has {number} addresses: engines behind it are taken for one, with one cache"
    return f"{text}; state a --worker for each, with an address of its own."


def other_block_size(stated: int | None, found: int | None) -> tuple[str, ...]:
    """What is wrong where the block size that an operator states is not the one that the engine tells."""
    if stated is None or found is None or stated == found:
        return ()
    told = f"A block size of {stated} tokens is stated, but the engine tells {found}"
    return (f"{told}, and no prefix is found by a wrong one; leave out block_size, unless the engine is wrong.",)


def blocks_of_another_size(expected: int, found: int) -> str:
    """What is wrong where an engine's events are of blocks that prompts are not cut into."""
    said = f"The engine's events are of blocks of {found} tokens, not of {expected} as it tells, or as is stated"
    return f"{said}, and no prefix is found by a wrong size; state --worker URL,block_size={found}."
