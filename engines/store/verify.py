"""Whether the keys that a store lists look like those of a layout: what the router is to ask for must be what the
engines write, or the store seems empty for ever."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from engines.store.keys import DIGEST_BYTES, Verdict
from engines.store.names import VllmKey, read_sglang, read_vllm
from engines.store.sglang import SglangLayout
from engines.store.vllm import VllmGroup, VllmLayout

Layout: TypeAlias = VllmLayout | SglangLayout
"""How one model's engines name their blocks in the store."""

_ENOUGH = 10_000
"""Keys to look at: a store may hold millions."""
_NAMED = 3
"""Things that a sentence lists at most."""


def verify(keys: Iterable[str], layout: Layout) -> Verdict:
    """`keys`: as GET /get_all_keys lists them, or some of them."""
    if layout.problem:
        return Verdict(None, f"{layout.model}: {layout.problem}.")
    seen = [key for key, _ in zip(keys, range(_ENOUGH), strict=False)]
    if not seen:
        return Verdict(None, "The store is empty: there is no key yet to compare with.")
    return _verify_vllm(seen, layout) if isinstance(layout, VllmLayout) else _verify_sglang(seen, layout)


def _verify_vllm(seen: Sequence[str], layout: VllmLayout) -> Verdict:
    keys = [key for key in map(read_vllm, seen) if key is not None]
    if not keys:
        return _none_alike("vLLM", seen)
    ours = [key for key in keys if _whole(key.prefix, key.model, key.namespace) == _whole(*_whose(layout))]
    if not ours:
        theirs = {_told(key.prefix, key.model, key.namespace) for key in keys}
        return Verdict(False, f"The store has keys of {_some(theirs)}, none of {_told(*_whose(layout))}.")
    differences = [*_in_digests({len(key.digest) for key in ours}), *_in_groups(ours, layout)]
    differences += [text for group in layout.groups for text in _in_ranks(ours, layout, group)]
    return _verdict(differences, layout.model)


def _whose(layout: VllmLayout) -> tuple[str, str, str]:
    return layout.prefix, layout.name, layout.namespace


def _whole(prefix: str, model: str, namespace: str) -> str:
    """As it stands in a key: a model's name with an `@` reads like one that has a prefix."""
    return f"{prefix}@{model}{namespace}" if prefix else model + namespace


def _told(prefix: str, model: str, namespace: str) -> str:
    with_prefix = f" with prefix {prefix!r}" if prefix else ""
    in_namespace = f" in namespace {namespace!r}" if namespace else ""
    return f"model {model!r}{with_prefix}{in_namespace}"


def _in_groups(keys: list[VllmKey], layout: VllmLayout) -> list[str]:
    seen, wanted = {key.group for key in keys}, {group.number for group in layout.groups}
    return _differing("group", seen, wanted)


def _in_ranks(keys: list[VllmKey], layout: VllmLayout, group: VllmGroup) -> list[str]:
    of_group = [key for key in keys if key.group == group.number]
    if not of_group:
        return []
    return [
        *_differing("tp_rank", {key.tp for key in of_group}, set(range(layout.ranks(group)))),
        *_differing("pp_rank", {key.pp for key in of_group}, set(range(layout.pp))),
        *_differing("pcp", {key.pcp for key in of_group}, {0}),
        *_differing("dcp", {key.dcp for key in of_group}, {0}),
    ]


def _verify_sglang(seen: Sequence[str], layout: SglangLayout) -> Verdict:
    keys = [found for found in map(read_sglang, seen) if found is not None]
    if not keys:
        return _none_alike("SGLang", seen)
    ours = [key for key in keys if key.start == layout.start]
    if not ours:
        theirs = {repr(key.start.rstrip("_")) for key in keys}
        return Verdict(False, f"The store has keys of {_some(theirs)}, none of {layout.start.rstrip('_')!r}.")
    differences = _in_digests({len(key.digest) for key in ours})
    differences += _differing("part", {key.end for key in ours}, set(layout.ends))
    return _verdict(differences, layout.model)


def _in_digests(digits: set[int]) -> list[str]:
    wrong = digits - {2 * DIGEST_BYTES}
    if not wrong:
        return []
    lengths = " and ".join(str(length * 4) for length in sorted(wrong))
    return [f"digests have {lengths} bits instead of {8 * DIGEST_BYTES}: another hash"]


def _differing(what: str, seen: set[int] | set[int | str] | set[str], wanted: set[int] | set[str]) -> list[str]:
    more, fewer = {str(one) for one in seen - wanted}, {str(one) for one in wanted - seen}
    told = [f"the store has keys of {what} {_some(more)}, which are not asked for"] if more else []
    return told + ([f"it has none of {what} {_some(fewer)}"] if fewer else [])


def _none_alike(engine: str, seen: Sequence[str]) -> Verdict:
    return Verdict(None, f"None of the store's keys is named as {engine} names them; one of them is {seen[0]!r}.")


def _verdict(differences: list[str], model: str) -> Verdict:
    if not differences:
        return Verdict(True, f"The keys of {model} are named as expected.")
    return Verdict(False, f"The keys of {model} are not as expected: {'; '.join(differences)}.")


def _some(things: set[str]) -> str:
    listed = sorted(things)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more
