"""The typed views of the sample lexicons: their names, columns and records, for the tests of typed views."""

import json
from typing import Any

import asyncpg

from indexer.db import Database
from tests.db.repo_rows import insert, put, synchronized
from tests.lexicons.samples import (
    LIKE,
    REVIEW,
)

VIEW = f'lexicon."{REVIEW}"'
LIKES = f'lexicon."{LIKE}"'
COLUMNS = """
    select attname as name, format_type(atttypid, atttypmod) as type, col_description(attrelid, attnum) as comment
    from pg_attribute where attrelid = $1::regclass and attnum > 0 order by attnum
"""


async def put_reviews(db: Database, *values: Any) -> None:
    """Insert a repo with a record of each value; the record keys are numbers from 0."""
    changes = [put(f"{REVIEW}/{number}", json.dumps(value)) for number, value in enumerate(values)]
    await insert(db, synchronized(1), changes=tuple(changes))


async def columns(sql: asyncpg.Connection, view: str) -> dict[str, str]:
    return {row["name"]: row["type"] for row in await sql.fetch(COLUMNS, view)}
