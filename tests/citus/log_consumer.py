"""A consumer of the change log that reads it while nodes and daemons are killed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from indexer.store.database_errors import DatabaseError, database_errors, opening
from tests.background import running

PAGE = 500
PAUSE = 0.05

_NEXT = "select seq, did, rev from atproto.changes_after($1, $2)"
_REVS = "select did, rev from indexer.repo where did = any($1)"
_ALL = "select seq from atproto.changes order by seq"


class LogConsumer:
    """Reads each change once, and checks that the database shows the effect of a change as soon as it has a number.

    Attributes:
        seqs: The numbers of the changes that were read, in the order in which they were read.
        checks: How often numbered changes were compared with the repos.
        failures: How often the database was unavailable meanwhile.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.seqs: list[int] = []
        self.checks = 0
        self.failures = 0
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read and check until the end of the block."""
        async with running(self._run()) as [self._task]:
            yield

    async def has_read_all(self) -> bool:
        """Return True if the consumer has exactly the changes that are in the log; raise what ended it."""
        if self._task is not None and self._task.done():
            self._task.result()
        connection = await asyncpg.connect(self._dsn)
        try:
            return [seq for (seq,) in await connection.fetch(_ALL)] == self.seqs
        finally:
            await connection.close()

    async def _run(self) -> None:
        unchecked: dict[str, str] = {}
        while True:
            try:
                with opening(self._dsn), database_errors():
                    await self._read_on(await asyncpg.connect(self._dsn, timeout=5, command_timeout=20), unchecked)
            except DatabaseError:
                self.failures += 1  # a node was killed
            await asyncio.sleep(PAUSE)

    async def _read_on(self, connection: asyncpg.Connection, unchecked: dict[str, str]) -> None:
        try:
            while True:
                await self._read(connection, unchecked)
                await asyncio.sleep(PAUSE)
        finally:
            connection.terminate()

    async def _read(self, connection: asyncpg.Connection, unchecked: dict[str, str]) -> None:
        """Read new changes, then the repos: these must not be older. A failed check is repeated."""
        after = self.seqs[-1] if self.seqs else 0
        for seq, did, rev in await connection.fetch(_NEXT, after, PAGE):
            self.seqs.append(seq)
            if rev is not None:
                unchecked[did] = max(rev, unchecked.get(did, ""))
        if unchecked:
            stored = {row["did"]: row["rev"] for row in await connection.fetch(_REVS, list(unchecked))}
            early = {did: (rev, stored.get(did)) for did, rev in unchecked.items() if (stored.get(did) or rev) < rev}
            assert not early, f"changes have numbers before the database shows their effects: {early}"
            unchecked.clear()
            self.checks += 1
