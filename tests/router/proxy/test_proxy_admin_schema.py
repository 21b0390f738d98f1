"""The admin surface against its own description, by Schemathesis: what that allows is taken, or refused with a status
that it names; what it does not allow is refused; and every answer has the shape that it gives."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import ensure_resource_availability, ignored_auth, use_after_free

from router.admin.openapi import NEW_WORKER, document
from tests.examples import examples
from tests.fakes.scripted_worker import ScriptedWorker
from tests.router.proxy.administering import administering

EXAMPLES = 40
"""Of each operation and kind."""
ELSEWHERE = [ignored_auth, ensure_resource_availability, use_after_free]
"""Keys are tested in test_proxy_admin.py, and a worker that is drained is still there for a while."""
NOBODY = {"url": "http://127.0.0.1:1", "events": "tcp://127.0.0.1:1", "replay": "tcp://127.0.0.1:1"}

POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations() if isinstance(each, Ok)}
OF_ONE = [label for label, operation in OPERATIONS.items() if operation.path_parameters]
ASKING = [label for label, operation in OPERATIONS.items() if operation.body or operation.query]

pytestmark = pytest.mark.usefixtures("log_level")


@pytest.mark.parametrize("label", OPERATIONS)
async def test_what_is_described_is_answered_as_described(a: ScriptedWorker, label: str) -> None:
    await ask(a, label, POSITIVE)


@pytest.mark.parametrize("label", OF_ONE)
async def test_of_a_worker_that_there_is_too(a: ScriptedWorker, label: str) -> None:
    await ask(a, label, POSITIVE, path_parameters={"id": a.name})


def test_all_of_the_description_is_asked() -> None:
    methods = {method.upper() for path in document()["paths"].values() for method in path if method != "parameters"}
    assert {label.split()[0] for label in OPERATIONS} == methods
    assert {label.split()[1] for label in OPERATIONS} == set(document()["paths"])


@pytest.mark.parametrize("label", ASKING)
async def test_what_is_not_described_is_refused(a: ScriptedWorker, label: str) -> None:
    await ask(a, label, NEGATIVE)


async def ask(worker: ScriptedWorker, label: str, mode: GenerationMode, **fixed: Any) -> None:
    async with administering(worker) as admin:
        surface = admin.router.app._admin
        assert surface
        await asyncio.to_thread(ask_examples, f"http://127.0.0.1:{surface.port}", OPERATIONS[label], mode, fixed)


def ask_examples(
    url: str, operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, fixed: dict[str, Any]
) -> None:
    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples(EXAMPLES),
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(mode, **fixed))
    def run(case: Case[Any]) -> None:
        stay_here(case.body)
        case.call_and_validate(url, excluded_checks=ELSEWHERE)

    run()


def stay_here(body: Any) -> None:
    """Whoever is told of is asked: it must be nobody."""
    for key, nobody in NOBODY.items() if isinstance(body, dict) else ():
        value = body.get(key)
        if isinstance(value, str) and re.search(NEW_WORKER["properties"][key]["pattern"], value):
            body[key] = nobody
