"""The bodies that workers are sent: the client's request, asking for token ids too; and the request for its
continuation."""

from __future__ import annotations

from collections.abc import Iterable

from engines.disaggregation.legs import Body, raw, value_of, write_body
from router.migration.refusal import CARRIED
from router.tokens import Endpoint

COMPLETION_TOKENS = 16
"""How long a completion is that states nothing (OpenAI's default, and vLLM's)."""
_TOLD = {"return_token_ids": raw(True)}


def wants_ids(body: Body) -> bool:
    """Whether the client itself asks for token ids, which then stay in what it is sent."""
    return value_of(body, "return_token_ids") is True


def with_ids(body: Body) -> bytes:
    """The client's request, asking for token ids too."""
    return write_body({**body, **_TOLD})


def tokens_left(body: Body, endpoint: Endpoint, prompt: int, output: int, max_model_len: int | None) -> int | None:
    """How many tokens may follow: by the request's own limit, less the `output` tokens that there are; else by what
    the context leaves behind `prompt` and `output` tokens. None: neither is known."""
    stated = value_of(body, "max_tokens")
    if endpoint == "completions":
        stated = stated if "max_tokens" in body else COMPLETION_TOKENS  # null is no limit
    else:
        preferred = value_of(body, "max_completion_tokens")
        stated = stated if preferred is None else preferred
    if stated is None:
        return None if max_model_len is None else max_model_len - prompt - output
    return int(stated) - output


def continuation(body: Body, prompt: Iterable[int], output: Iterable[int], left: int) -> bytes:
    """The body that asks /v1/completions to go on after `prompt` and `output`, with up to `left` tokens, whichever
    endpoint `body` is for."""
    output = list(output)
    asked = {name: value for name, value in body.items() if name in CARRIED}
    asked |= {"prompt": raw([*prompt, *output]), "max_tokens": raw(left), **_TOLD}
    least = value_of(body, "min_tokens")
    if least:
        asked["min_tokens"] = raw(max(0, least - len(output)))
    return write_body(asked)
