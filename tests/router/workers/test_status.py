"""What is shown of workers, of many of them in turns with all else."""

from __future__ import annotations

from engines.description import EngineDescription
from router.http.pool import Pool
from router.workers.fleet import Fleet
from router.workers.spec import parse_worker
from router.workers.status import PIECE, worker_statuses
from router.workers.worker import Worker
from tests.router.test_routing import context


def worker(name: str) -> Worker:
    made = Worker(parse_worker(f"http://{name}:1,name={name}"), Pool(f"http://{name}:1", 1.0))
    made.description = EngineDescription("vllm", dp_size=8)
    return made


def test_workers_are_looked_at_in_turns_with_all_else_and_may_leave_meanwhile() -> None:
    """A load balancer asks every few seconds, and each rank of hundreds of workers takes its time."""
    workers = [worker(f"w{number}") for number in range(4 * PIECE)]
    fleet = Fleet(workers)
    looking = worker_statuses(context()._replace(fleet=fleet))
    for _ in range(4):
        looking.send(None)
        fleet.remove(fleet.workers[next(reversed(fleet.workers))])
    try:
        looking.send(None)
    except StopIteration as ended:
        found = ended.value
    assert [status.id for _, status in found] == [each.id for each in workers]
    assert [status.state for _, status in found].count("draining") == 3
