"""YAML that people wrote: read with care, and what is wrong with it in one sentence."""

from __future__ import annotations

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


class _UniqueKeys(yaml.SafeLoader):
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


def read_yaml(text: str) -> Any:
    """Raises NotYaml."""
    try:
        return yaml.load(text, _UniqueKeys)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, *_NO_VALUE) as error:
        raise NotYaml(error) from None
