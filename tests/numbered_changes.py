"""Numbers for committed changes in tests that run no daemon, which would assign them on a cluster."""

import asyncpg

from indexer.cluster.numbering import ChangeNumbering
from indexer.db import Database
from indexer.telemetry.conditions import Conditions
from tests.waiting import until


async def number_changes(db: Database, sql: asyncpg.Connection) -> None:
    """Assign numbers to all committed changes on a cluster, as a daemon does. On one Postgres, each COMMIT does so."""

    async def all_are_numbered() -> bool:
        await ChangeNumbering(db, Conditions()).finish()
        return not await sql.fetch("select from indexer.unnumbered_batch")

    if not db.layout.commit_numbers:
        await until(all_are_numbered)
