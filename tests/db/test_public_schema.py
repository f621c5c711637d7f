"""Nothing is removed from the public schema, and nothing is added without a new snapshot in public_schema.txt.

`python -m tests.db.test_public_schema` writes the snapshot. tests/docs/ compares docs/sql.md with the database.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg

from docs.generate import VIEWS, public_schema_signatures
from indexer.db.migrate import migrate
from indexer.embedded import database
from tests.db.change_log_helpers import connected

SNAPSHOT = Path(__file__).with_name("public_schema.txt")
COLUMNS = """
    select attname as name, format_type(atttypid, atttypmod) as type
    from pg_attribute where attrelid = ('atproto.' || $1)::regclass and attnum > 0 order by attnum
"""
RESULTS = """
    select proname as name, pg_get_function_result(oid) as result
    from pg_proc where pronamespace = 'atproto'::regnamespace
"""


async def test_nothing_is_removed_from_the_public_schema(sql: asyncpg.Connection) -> None:
    promised, present = SNAPSHOT.read_text().splitlines(), await public_schema_signatures(sql)
    assert [line for line in promised if line not in present] == [], "the public schema has lost a column or function"
    assert present == promised, "the public schema has grown; run python -m tests.db.test_public_schema"
    for view in VIEWS:  # `select *` and `create or replace view` need that new columns come last
        columns = [line.split()[0] for line in promised if line.startswith(f"{view}.")]
        assert columns
        found = [f"{view}.{name}" for name, _ in await sql.fetch(COLUMNS, view)]
        assert found[: len(columns)] == columns


async def test_functions_of_the_change_log_return_the_columns_of_its_view(sql: asyncpg.Connection) -> None:
    columns = [(row["name"], row["type"]) for row in await sql.fetch(COLUMNS, "changes")]
    given = ", ".join(f'"{name}" {type_}' if name == "time" else f"{name} {type_}" for name, type_ in columns)
    results = {row["name"]: row["result"] for row in await sql.fetch(RESULTS)}
    assert results["next_changes"] == results["changes_after"] == f"TABLE({given})"


async def write_snapshot(directory: Path) -> None:
    async with database(None, directory) as dsn:
        await migrate(dsn)
        async with connected(dsn) as connection:
            SNAPSHOT.write_text("\n".join(await public_schema_signatures(connection)) + "\n")


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        asyncio.run(write_snapshot(Path(directory)))
