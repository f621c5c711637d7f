"""Measure CPU time and elapsed time by stage, in this process and in Postgres."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time


class StageClock:
    """Seconds by stage.

    Attributes:
        cpu: CPU seconds of this process; under "database", those of Postgres.
        elapsed: Elapsed seconds.
    """

    def __init__(self, postgres: Callable[[], float] = lambda: 0.0) -> None:
        """Measure Postgres by `postgres`, which returns its CPU seconds so far."""
        self.cpu: dict[str, float] = defaultdict(float)
        self.elapsed: dict[str, float] = defaultdict(float)
        self._postgres = postgres

    def clear(self) -> None:
        """Forget what was measured so far."""
        self.cpu.clear()
        self.elapsed.clear()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        began, cpu = perf_counter(), process_time()
        yield
        self.cpu[stage] += process_time() - cpu
        self.elapsed[stage] += perf_counter() - began

    @contextmanager
    def database(self) -> Iterator[None]:
        """Measure a block that only queries the database: this process as "client", Postgres as "database"."""
        before = self._postgres()
        with self("client"):
            yield
        self.cpu["database"] += self._postgres() - before
