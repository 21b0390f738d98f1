"""Shows the progress of a mode: a bar at a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from router.ab.client import Outcome


@contextmanager
def progress(console: Console, mode: str, total: int) -> Iterator[Callable[[Outcome], None]]:
    """Yields a function to call after each request."""
    if not console.is_terminal:
        yield _lines(console, mode, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Only twice a second, since drawing the bar takes CPU time from what is measured.
    with Progress(*columns, console=console, refresh_per_second=2) as bar:
        task, errors = bar.add_task(mode, total=total), 0

        def advance(outcome: Outcome) -> None:
            nonlocal errors
            errors += bool(outcome.error)
            bar.update(task, advance=1, description=f"{mode} [red]{errors} errors[/]" if errors else mode)

        yield advance


def _lines(console: Console, mode: str, total: int) -> Callable[[Outcome], None]:
    """Prints a line at every tenth of the requests."""
    done = errors = 0

    def advance(outcome: Outcome) -> None:
        nonlocal done, errors
        done += 1
        errors += bool(outcome.error)
        if done * 10 // total != (done - 1) * 10 // total:
            with suppress(OSError):  # a full disk does not end what is measured
                console.print(f"{mode}: {done} of {total} requests done, {errors} errors", highlight=False)

    return advance
