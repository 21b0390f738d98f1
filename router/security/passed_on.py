"""Requests that the router passes on without knowing them: each must be read behind it as it is read here. Pure."""

from __future__ import annotations

from typing import Literal
from urllib.parse import unquote_to_bytes

from router.http.messages import Headers, RequestHead, first, may_pass
from router.openai.errors import BadRequest

METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))
"""TRACE is not among them: it would show the client what its worker was sent, the workers' own key too."""
_LORA = (b"load_lora_adapter", b"unload_lora_adapter", b"set_lora", b"merge_lora_weights", b"unmerge_lora_weights")
MANAGING = frozenset(b"v1/" + name for name in _LORA)
"""They change for everybody what a worker serves, and would come with the workers' own key: of vLLM, and of SGLang's
servers for diffusion."""
_HIDDEN = frozenset((b"", b".", b".."))
_STRANGE = frozenset(b"\\#?\x7f").union(range(0x20))
_SLASH = "The path must be written without the '/' at its end."
_TWICE = (
    "There is no such path: it has /v1/ twice. The client appends /v1, or a whole path, to a base URL that ends in one "
    "already."
)


def check_passed_on(head: RequestHead, own: frozenset[bytes]) -> None:
    """`own`: the paths that the router reads itself. Raises BadRequest for one of them in disguise, for a path that
    leads out of /v1 once it is normalised, for one that manages workers, for one that engines redirect, for one that no
    engine has, as clients make of a base URL, for a method that workers have no use for, and for a WebSocket."""
    if head.method not in METHODS:
        raise BadRequest(405, "This method is not passed on to workers.")
    if head.path.rstrip(b"/") in own:
        raise BadRequest(400, _SLASH)
    if head.method == b"GET" and first(head.headers, b"sec-websocket-key"):
        # Without its offer to upgrade, the engine would say that there is no such path.
        raise BadRequest(501, "WebSockets are not passed on to workers: connect to the worker itself.")
    plain = unquote_to_bytes(head.path)
    twice = unquote_to_bytes(plain) != plain  # somebody behind may decode it again
    *folders, last = (part.partition(b";")[0] for part in plain.split(b"/")[1:])
    hidden = not _HIDDEN.isdisjoint(folders) or last in {b".", b".."}
    if twice or hidden or not _STRANGE.isdisjoint(plain) or plain.rstrip(b"/") in own:
        raise BadRequest(400, "The path must be written plainly: without '//', '.', '..', '#' and needless '%'.")
    if b"/".join((*folders, last)).rstrip(b"/") in MANAGING:
        raise BadRequest(403, "This path changes what a worker serves, and is not for clients: ask the worker itself.")
    if b"/v1/" in head.path[1:]:  # else an engine would answer "Not Found", and no more
        raise BadRequest(404, _TWICE)
    if head.path.endswith(b"/"):  # engines redirect it, and the client would not be told where to
        raise BadRequest(400, _SLASH)


def content_kind(headers: Headers) -> Literal["json", "other", "unclear"]:
    """What the body is said to be to the worker, which is not told what `Connection` declares to be for this hop only.
    A form may look like JSON with another model in it; and what is said twice, or not at all, may be taken for
    either."""
    said = may_pass(headers, (b"content-type",))
    # Engines read it as text, whose blanks are more than those of bytes: a no-break space is one.
    kinds = [value.decode("latin-1").partition(";")[0].strip().lower() for _, value in said]
    if kinds and all(kind == "application/json" for kind in kinds):
        return "json"
    return "unclear" if not kinds or any(kind.endswith("json") for kind in kinds) else "other"
