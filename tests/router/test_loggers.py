"""What is logged can be found, and set louder, by the name of the module or package that says it."""

from __future__ import annotations

import importlib
import logging
import pkgutil

import router


def test_loggers_have_the_names_of_their_modules_or_packages() -> None:
    names = [found.name for found in pkgutil.walk_packages(router.__path__, "router.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    loggers = {module.__name__: vars(module).get("logger") for module in modules}
    told = {name: logger.name for name, logger in loggers.items() if isinstance(logger, logging.Logger)}
    assert [name for name, logger in told.items() if not f"{name}.".startswith(f"{logger}.")] == []
    assert len(told) > 10
