"""A wrong clock: the modules of the product read the time with an offset, which may change while the process runs.

So does a database that is on the same machine. Timers of asyncio and monotonic clocks keep running, as they do when the
clock of a machine is set.
"""

import sys
import time
from pathlib import Path

import asyncpg

from tests.database_checks import fetch

_REPLACE_FUNCTIONS = """
    create schema clock;
    create table clock.shift as select 0 as seconds;
    create function clock.shift() returns interval language plpgsql stable
        as 'begin return (select make_interval(secs => seconds) from clock.shift); end';
    set allow_system_table_mods = on;
    create or replace function pg_catalog.now() returns timestamptz language sql stable
        as 'select transaction_timestamp() + clock.shift()';
    create or replace function pg_catalog.statement_timestamp() returns timestamptz language sql stable
        as 'select transaction_timestamp() + clock.shift()';
    create or replace function pg_catalog.clock_timestamp() returns timestamptz language sql volatile
        as 'select timeofday()::timestamptz + clock.shift()';
"""
"""Changes the clock of one database: statements, defaults of columns, functions and views.

It works because the planner puts the bodies of functions in SQL into the statement. `transaction_timestamp()` stays
right.
"""


class Offset:
    """The offset of the clocks of some processes, and of a database.

    Attributes:
        file: Contains the offset in seconds.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._dsn: str | None = None
        self._write(0)

    async def include_database(self, dsn: str) -> None:
        """Let this database have the offset, too. The user must be a superuser."""
        connection = await asyncpg.connect(dsn)
        await connection.execute(_REPLACE_FUNCTIONS)
        await connection.close()
        self._dsn = dsn

    async def set(self, seconds: int) -> None:
        """Let the clocks be ahead of the real time by some seconds; behind it if they are negative."""
        self._write(seconds)
        if self._dsn is not None:
            await fetch(self._dsn, "update clock.shift set seconds = $1", seconds)
            [(shift,)] = await fetch(self._dsn, "select date_part('epoch', now() - transaction_timestamp())")
            assert shift == seconds

    def _write(self, seconds: int) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self.file)


def read_wrong_clock(file: Path) -> None:
    """Let this process read the time with the offset in this file."""
    right = time.time

    def wrong() -> float:
        return right() + int(file.read_text())

    time.time = wrong  # modules that are imported later
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "indexer":
            vars(module).update({key: wrong for key, value in vars(module).items() if value is right})
