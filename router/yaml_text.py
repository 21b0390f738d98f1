"""YAML that people wrote: read with care, and what is wrong with it in one sentence."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import yaml

_NO_VALUE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What PyYAML raises for `2001-99-99`, `!!int x`, `!!bool x`, `!!timestamp x` and brackets without end."""


class NotYaml(Exception):
    def __init__(self, error: Exception) -> None:
        mark = getattr(error, "problem_mark", None)
        self.line = f", line {mark.line + 1}" if mark else ""
        """To go behind "is not valid YAML"."""
        problem = getattr(error, "problem", error)  # which may quote what stands there
        super().__init__(f"{self.line}: {problem}")


class _UniqueKeys(yaml.constructor.SafeConstructor):
    """YAML lets the last of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(problem="a key is no text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Loader(_UniqueKeys, yaml.SafeLoader):
    """Says best what is wrong."""


def _fast_loader() -> Any:
    """Takes a quarter of the time, where PyYAML was built with libyaml: that finds the events, which are put together
    by PyYAML's own code. libyaml's has no limit to how deep it goes, and a file of brackets would end the process."""
    if not yaml.__with_libyaml__:
        return _Loader

    class FastLoader(_UniqueKeys, yaml.composer.Composer, yaml.CSafeLoader):
        def __init__(self, text: str) -> None:
            yaml.CSafeLoader.__init__(self, text)
            yaml.composer.Composer.__init__(self)

    return FastLoader


_FastLoader = _fast_loader()


def read_yaml(text: str) -> Any:
    """Raises NotYaml."""
    errors, collects = (yaml.YAMLError, *_NO_VALUE), gc.isenabled()
    gc.disable()  # of a long text there are millions of nodes, which it would look through again and again
    try:
        with contextlib.suppress(*errors):
            return yaml.load(text, _FastLoader)  # noqa: S506 - a SafeLoader
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except errors as error:
        raise NotYaml(error) from None
    finally:
        if collects:
            gc.enable()
