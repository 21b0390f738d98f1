"""`router store query`: how much of one prompt the store has, where, and what that is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from engines.description import Model, bases
from engines.store import Layout, Segment, Stored, VllmLayout
from indexer.hashing import pack_tokens
from indexer.types import Namespace
from router.scheduling.latency import LatencyModel, Prefill
from router.scheduling.transfer import prior_seconds
from router.store_cli.errors import WrongUse
from router.store_cli.peers import Master
from router.store_cli.text import aligned, count, share, size


class Owner(msgspec.Struct, frozen=True):
    """Whose memory holds objects of the prompt; those on disk have nobody's."""

    host: str
    segment: str
    objects: int
    bytes: int


class Found(msgspec.Struct, frozen=True):
    model: str
    """As it stands in the keys."""
    tokens: int
    """Of the prompt."""
    block_size: int
    blocks: int
    """Full ones of the prompt."""
    stored_blocks: int
    """Leading ones: what the workers can load."""
    stored_tokens: int
    stored_bytes: int
    unreached_blocks: int
    """That are there behind the first one that is missing."""
    missing_key: str | None
    """The first; None: all are there."""
    owners: list[Owner]
    prefill_seconds_saved: float
    load_seconds: float
    """Both by the priors of the router's latency model."""


async def query(master: Master, layout: Layout, tokens: Sequence[int], namespace: Namespace) -> Found:
    digests = layout.hashes(pack_tokens(tokens), namespace)
    if digests is None:
        raise WrongUse(f"The keys cannot be known: {layout.problem or 'the adapter is loaded from no known path'}.")
    blocks = [layout.keys(digest) for digest in digests]
    objects = await master.objects([key for block in blocks for key in block])
    return read_found(layout, len(tokens), blocks, objects, await master.segments())


def read_found(
    layout: Layout,
    tokens: int,
    blocks: Sequence[Sequence[str]],
    objects: Mapping[str, Stored],
    segments: Sequence[Segment],
) -> Found:
    """`blocks`: the keys of each. `objects`: those of them that are there."""
    whole = [all(key in objects for key in block) for block in blocks]
    leading = whole.index(False) if False in whole else len(whole)
    missing = [key for block in blocks[leading : leading + 1] for key in block if key not in objects]
    held = [objects[key] for block in blocks[:leading] for key in block]
    stored = leading * layout.block_size
    return Found(
        model=layout.name if isinstance(layout, VllmLayout) else layout.model,
        tokens=tokens,
        block_size=layout.block_size,
        blocks=len(blocks),
        stored_blocks=leading,
        stored_tokens=stored,
        stored_bytes=sum(one.size for one in held),
        unreached_blocks=sum(whole[leading:]),
        missing_key=missing[0] if missing else None,
        owners=_owners(held, segments),
        prefill_seconds_saved=_saved(tokens, stored),
        load_seconds=prior_seconds(np.array([stored])).item() if stored else 0.0,
    )


def _owners(held: Sequence[Stored], segments: Sequence[Segment]) -> list[Owner]:
    names = {segment.endpoint: segment.name for segment in segments}
    objects: dict[str, list[int]] = {}
    for one in held:
        for owner in one.owners or ("",):
            objects.setdefault(owner, []).append(one.size)
    return [
        Owner(_host(names.get(owner, owner)), names.get(owner, owner), len(sizes), sum(sizes))
        for owner, sizes in sorted(objects.items())
    ]


def _host(segment: str) -> str:
    return segment.rpartition(":")[0] if segment else "(disk)"


def _saved(tokens: int, stored: int) -> float:
    """Engines compute a prompt's last token in any case."""
    latency = LatencyModel()
    left = max(tokens - stored, 1)
    return latency.prefill_work(Prefill(tokens, tokens)) - latency.prefill_work(Prefill(left, tokens))


def namespace_of(models: Sequence[Model], name: str | None, salt: str | None) -> tuple[Model, Namespace]:
    """The base model behind `name`, and what it stands for in hashes. WrongUse when it is none of the worker's."""
    base_models = bases(models)
    known = {model.id: model for model in models}
    if name is None and len(base_models) != 1:
        raise WrongUse(f"The worker serves {len(base_models)} models: name one of them in a --request.")
    asked = base_models[0] if name is None else known.get(name)
    if asked is None:
        raise WrongUse(f"The worker does not serve {name!r}; it serves {', '.join(known) or 'nothing'}.")
    base = known.get(asked.parent, asked) if asked.parent else asked
    return base, Namespace(asked.adapter, salt)


def show(found: Found) -> str:
    part, size_ = share(found.stored_tokens, found.tokens), found.block_size
    stored = count(found.stored_blocks, "block")
    rows = [
        ("prompt", f"{count(found.tokens, 'token')} of {found.model}, {found.blocks:,} full blocks of {size_}"),
        ("in store", f"{stored}, {found.stored_tokens:,} tokens ({part}), {size(found.stored_bytes)}"),
        ("missing", _missing(found)),
        ("worth", f"{found.prefill_seconds_saved:.3f} s of prefill for {found.load_seconds:.3f} s of loading"),
        ("", "by priors, of an 8B model over 100 Gbit/s; a router learns what its own fleet takes"),
    ]
    owners = [(one.host, one.segment, one.objects, size(one.bytes)) for one in found.owners]
    tables = [aligned([("HOST", "SEGMENT", "OBJECTS", "SIZE"), *owners])] if owners else []
    return "\n\n".join([aligned(rows), *tables])


def _missing(found: Found) -> str:
    if found.missing_key is None:
        return "nothing"
    behind = f" ({found.unreached_blocks:,} behind it are there, and of no use)" if found.unreached_blocks else ""
    return f"from block {found.stored_blocks} on{behind}: {found.missing_key}"
