"""`router store hot`: the prefixes that a router's clients ask for most, and where they lie now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from engines.answers import UNDECODABLE
from engines.store import Segment, Stored
from router.store.hot_page import PATH, Hot, HotPage
from router.store_cli.errors import Away
from router.store_cli.peers import Master, Peer
from router.store_cli.text import aligned


class Prefix(msgspec.Struct, frozen=True):
    model: str
    hash: str
    tokens: int
    asked: float
    on_gpu: list[str]
    """Ranks, as worker#dp_rank."""
    below_gpu: list[str]
    stored: bool | None
    """Whether the store has its last block; None: the router has forgotten what that is called there."""
    hosts: list[str]
    """Of the segments that have it."""


class HotFound(msgspec.Struct, frozen=True):
    half_life_seconds: float
    prefixes: list[Prefix]
    """Of each model those first that were asked for most, times their length."""


async def hot(master: Master, router: Peer) -> HotFound:
    page = await _page(router)
    prefixes = [(model.model, one) for model in page.models for one in model.prefixes]
    objects = await master.objects([key for _, one in prefixes for key in one.store_keys])
    segments = {segment.endpoint: segment for segment in await master.segments()}
    return HotFound(page.half_life_seconds, [_prefix(model, one, objects, segments) for model, one in prefixes])


async def _page(router: Peer) -> HotPage:
    status, body = await router.ask("GET", PATH)
    if status == 404:
        raise Away(f"{router.url} counts no prefixes: a router without --store is there, or none.")
    if status in {401, 403}:
        raise Away(f"The router at {router.url} tells this to admins only: give an admin's key by --key-file.")
    if status != 200:
        raise Away(f"The router at {router.url} answers {PATH} with {status}.")
    try:
        return msgspec.json.decode(body, type=HotPage)
    except UNDECODABLE as error:
        raise Away(f"The router at {router.url} answers {PATH} with nonsense: {error}.") from None


def _prefix(model: str, one: Hot, objects: Mapping[str, Stored], segments: Mapping[str, Segment]) -> Prefix:
    held = [objects[key] for key in one.store_keys if key in objects]
    stored = len(held) == len(one.store_keys) if one.store_keys else None
    names = {segments[owner].name if owner in segments else owner for each in held for owner in each.owners}
    hosts = sorted({name.rpartition(":")[0] for name in names})
    return Prefix(model, one.hash, one.tokens, one.asked, one.on_gpu, one.below_gpu, stored, hosts)


def show(found: HotFound) -> str:
    if not found.prefixes:
        return "No prefix was asked for twice of late."
    head = ("ASKED", "TOKENS", "MODEL", "PREFIX", "ON GPU", "BELOW", "STORE")
    older = f"those before the last {found.half_life_seconds:g} s count half, and so on"
    return f"{aligned([head, *map(_row, found.prefixes)])}\n\nAsked: times; {older}."


def _row(one: Prefix) -> tuple[str, ...]:
    store = {None: "unknown", False: "no", True: "yes" + (f", {_some(one.hosts)}" if one.hosts else "")}[one.stored]
    return f"{one.asked:g}", f"{one.tokens:,}", one.model, one.hash, _some(one.on_gpu), _some(one.below_gpu), store


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return " ".join(names[:3]) + more if names else "-"
