"""A policy of another package, watched: what is wrong with its answers costs no request and is told of."""

from __future__ import annotations

import logging
from pathlib import Path
from traceback import extract_tb

import numpy as np

from publishers.logs import Seldom, log_event
from router.scheduling.decision import Cost, CostPolicy, Situation

logger = logging.getLogger(__name__)

FAULTY = "A policy's answer cannot be used, so that another chooses: see to the package it is from"


class PolicyFault(Exception):
    """What is wrong with an answer of a policy."""


class InstalledPolicy:
    """Implements `CostPolicy`. Where `policy` fails, `instead` answers; if that is None, PolicyFault is raised."""

    def __init__(self, name: str, policy: CostPolicy, instead: CostPolicy | None) -> None:
        self._name = name
        self._policy = policy
        self._instead = instead
        self._faults = 0
        self._seldom = Seldom()

    def cost(self, situation: Situation) -> Cost:
        try:
            return _checked(self._answer(situation), len(situation.candidates))
        except PolicyFault as fault:
            if self._instead is None:
                raise PolicyFault(f"the policy {self._name}: {fault}") from fault
            self._tell(fault, situation.now)
        return self._instead.cost(situation)

    def _answer(self, situation: Situation) -> Cost:
        try:
            return self._policy.cost(situation)
        except Exception as error:
            # Of any kind: a request is to be routed.
            raise PolicyFault(f"it raised {error!r} ({_where(error)})") from error

    def _tell(self, fault: PolicyFault, now: float) -> None:
        self._faults += 1
        if self._seldom.may(now):
            self._seldom.said(now)
            log_event(logger, logging.ERROR, FAULTY, policy=self._name, fault=fault, faults=self._faults)


def _where(error: Exception) -> str:
    """The policy's own line in which it was raised, or from which."""
    _ours, *others = extract_tb(error.__traceback__)
    return f"{Path(others[0].filename).name}, line {others[0].lineno}" if others else "not in Python"


def _checked(cost: Cost, candidates: int) -> Cost:
    """The cost in the types that it says. Raises PolicyFault."""
    try:
        values, prompt = np.asarray(cost.values, np.float64), float(cost.prompt)
        ready = None if cost.open is None else np.asarray(cost.open, np.bool_)
    except (AttributeError, TypeError, ValueError) as error:
        raise PolicyFault(f"its answer is no Cost: {error}") from error
    if values.shape != (candidates,):
        raise PolicyFault(f"its costs have the shape {values.shape}, and there are {candidates} candidates")
    if np.isnan(values).any():
        raise PolicyFault(f"{np.isnan(values).sum()} of its {candidates} costs are NaN")
    if np.isnan(prompt):
        raise PolicyFault("its cost of the whole prompt is NaN")
    if ready is not None and ready.shape != (candidates,):
        raise PolicyFault(f"what it says is open has the shape {ready.shape}, and there are {candidates} candidates")
    return Cost(values, prompt, ready)
