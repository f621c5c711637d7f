"""docs/sql.md says what the database says, and what was once in the face stays in it.

To write both anew: python -m tests.store.test_face
"""

import asyncio
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg

from tests.conftest import Server

PAGE = Path(__file__).parents[2] / "docs" / "sql.md"
SNAPSHOT = Path(__file__).with_name("face.txt")
BLOCK = re.compile(r"(<!-- face:.*?-->\n).*?(<!-- /face -->)", re.DOTALL)

VIEWS = """
    select c.relname as name, obj_description(c.oid, 'pg_class') as comment
    from pg_class c where relnamespace = 'atproto'::regnamespace and relkind in ('v', 'm', 'r')
    order by
        array_position(array['repos', 'records', 'changes', 'readers', 'cursors', 'hosts', 'rejected'], relname::text)
"""
COLUMNS = """
    select attname as name, format_type(atttypid, atttypmod) as type, col_description(attrelid, attnum) as comment
    from pg_attribute where attrelid = ('atproto.' || $1)::regclass and attnum > 0 order by attnum
"""
FUNCTIONS = """
    select proname as name, pg_get_function_arguments(oid) as arguments, pg_get_function_result(oid) as result,
        obj_description(oid, 'pg_proc') as comment
    from pg_proc where pronamespace = 'atproto'::regnamespace order by proname
"""


async def described(sql: asyncpg.Connection) -> str:
    parts = []
    for view, comment in await sql.fetch(VIEWS):
        rows = await sql.fetch(COLUMNS, view)
        table = "".join(f"| `{name}` | {type_} | {text} |\n" for name, type_, text in rows)
        parts.append(f"\n## View `atproto.{view}`\n\n{comment}\n\n| column | type | meaning |\n|---|---|---|\n{table}")
    parts.append("\n## Functions\n")
    for name, arguments, result, comment in await sql.fetch(FUNCTIONS):
        returns = "as the view `changes`" if result.startswith("TABLE") else f"`{result}`"
        parts.append(f"\n**`atproto.{name}({arguments})`** → {returns}  \n{comment}\n")
    return "".join(parts)


async def signatures(sql: asyncpg.Connection) -> list[str]:
    """A line for each thing that a reader's statement may hold on to."""
    columns = [
        f"{view}.{name} {type_}"
        for view, _ in await sql.fetch(VIEWS)
        for name, type_, _ in await sql.fetch(COLUMNS, view)
    ]
    return [*columns, *(f"{name}({given}) {result}" for name, given, result, _ in await sql.fetch(FUNCTIONS))]


async def test_the_page_says_what_the_database_says(sql: asyncpg.Connection) -> None:
    text = PAGE.read_text()
    assert await written(sql) == text, "docs/sql.md is behind: python -m tests.store.test_face"


async def test_what_was_once_promised_is_kept(sql: asyncpg.Connection) -> None:
    promised, present = SNAPSHOT.read_text().splitlines(), await signatures(sql)
    assert [line for line in promised if line not in present] == [], "the face has lost something that was promised"
    assert present == promised, "the face has grown: python -m tests.store.test_face"


async def test_columns_keep_their_places(sql: asyncpg.Connection) -> None:
    """`select *` and `create or replace view` count on it: what is new comes last."""
    for view, _ in await sql.fetch(VIEWS):
        promised = [line.split()[0] for line in SNAPSHOT.read_text().splitlines() if line.startswith(f"{view}.")]
        present = [f"{view}.{name}" for name, *_ in await sql.fetch(COLUMNS, view)]
        assert present[: len(promised)] == promised


async def test_functions_of_the_feed_give_the_columns_of_its_view(sql: asyncpg.Connection) -> None:
    columns = [(row["name"], row["type"]) for row in await sql.fetch(COLUMNS, "changes")]
    given = ", ".join(f'"{name}" {type_}' if name == "time" else f"{name} {type_}" for name, type_ in columns)
    results = {name: result for name, _, result, _ in await sql.fetch(FUNCTIONS)}
    assert results["next_changes"] == results["changes_after"] == f"TABLE({given})"


async def written(sql: asyncpg.Connection) -> str:
    face = await described(sql)
    return BLOCK.sub(lambda match: f"{match[1]}{face}{match[2]}", PAGE.read_text())


async def write(dsn: str) -> None:
    sql = await asyncpg.connect(dsn)
    try:
        PAGE.write_text(await written(sql))
        SNAPSHOT.write_text("\n".join(await signatures(sql)) + "\n")
    finally:
        await sql.close()


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        server = Server(Path(directory))
        asyncio.run(write(server.create(migrated=True)))
        server.close()
