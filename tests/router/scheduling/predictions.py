"""What a latency model predicts of each rank, by the loop that the router asks."""

from __future__ import annotations

import numpy as np

from indexer.types import RankSet, WorkerRank
from router.scheduling import figures
from router.scheduling.candidates import Figures, Seconds
from router.scheduling.decision import UNBOUNDED
from router.scheduling.latency import LatencyModel


def prefill_factors(model: LatencyModel, ranks: RankSet, now: float) -> Seconds:
    known, _, places, _, _ = model.columns(ranks, now)
    found: Seconds = known[places]
    return found


def prefill_seconds(model: LatencyModel, ranks: RankSet, held: Figures | Seconds, prompt: int, now: float) -> Seconds:
    """Of a prompt of which each rank has `held` tokens."""
    nothing = np.zeros(len(ranks), np.int64)
    return _estimate(figures.OWN_PREFILL, model, ranks, now, prompt, nothing, nothing, held)


def step_seconds(
    model: LatencyModel, ranks: RankSet, requests: Figures, active: Figures, prompt: int, now: float
) -> Seconds:
    """With one more request, of `prompt` tokens, beside so many that have `active` tokens in all."""
    return _estimate(figures.STEP, model, ranks, now, prompt, requests, active, np.zeros(len(ranks), np.int64))


def unfit(model: LatencyModel, notes: str, rank: WorkerRank) -> None:
    """From now on a fault is raised where the model looks into these notes of the rank. (A compiled class has methods
    that cannot be replaced.)"""
    place = model._places.get(rank)
    getattr(model, notes)[place] = 1


def _estimate(
    row: int,
    model: LatencyModel,
    ranks: RankSet,
    now: float,
    prompt: int,
    requests: Figures,
    active: Figures,
    held: Figures | Seconds,
) -> Seconds:
    """Of ranks that have nothing before them, in blocks of one token."""
    count = len(ranks)
    loads, works = (np.zeros((1, rows, count), np.int64) for rows in (figures.LOAD_ROWS, figures.BACKLOG_ROWS))
    loads[0, figures.REQUESTS], loads[0, figures.ACTIVE] = requests, active
    places, ones, blocks = np.arange(count), np.ones(count, np.int64), held.astype(np.int32)
    prefills, steps, factor_places, prefill, step = model.columns(ranks, now)
    counts, estimates = figures.matrices(count)
    figures.work_out(
        loads,
        0,
        places,
        np.full((2, count), UNBOUNDED),
        works,
        places,
        prefills,
        steps,
        factor_places,
        prefill,
        step,
        blocks,
        blocks,
        blocks,
        ones,
        ones < 0,
        prompt,
        0,
        1.0,
        1.0,
        now,
        counts,
        estimates,
    )
    found: Seconds = estimates[row]
    return found
