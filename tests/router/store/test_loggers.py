"""What is logged of the store can be found, and set louder, by the name of its package."""

from __future__ import annotations

import importlib
import pkgutil

import router.store


def test_loggers_have_their_modules_names() -> None:
    modules = [
        importlib.import_module(f"router.store.{found.name}") for found in pkgutil.iter_modules(router.store.__path__)
    ]
    logging = [module for module in modules if hasattr(module, "logger")]
    assert [module.logger.name for module in logging] == [module.__name__ for module in logging] != []
