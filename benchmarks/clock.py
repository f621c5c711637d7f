"""Time by stage: what this process has used of a core, what has passed, and what Postgres has used meanwhile."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time


class Clock:
    """Seconds by stage. `postgres` tells how many Postgres has used so far."""

    def __init__(self, postgres: Callable[[], float] = lambda: 0.0) -> None:
        self.used: dict[str, float] = defaultdict(float)
        self.passed: dict[str, float] = defaultdict(float)
        self._postgres = postgres

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began, used = perf_counter(), process_time()
        yield
        self.used[stage] += process_time() - used
        self.passed[stage] += perf_counter() - began

    @contextmanager
    def database(self) -> Iterator[None]:
        """Times a block that does nothing but ask the database: "client" is our part of it, "database" Postgres's."""
        theirs = self._postgres()
        with self("client"):
            yield
        self.used["database"] += self._postgres() - theirs
