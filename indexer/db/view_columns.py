"""Read the columns of views from the catalog."""

from typing import NamedTuple

from indexer.db.columns import Connection

_COLUMNS = """
    select relname as view, obj_description(c.oid, 'pg_class') as view_comment, attname as name,
        format_type(atttypid, atttypmod) as type, col_description(attrelid, attnum) as comment
    from pg_class c join pg_attribute on attrelid = c.oid and attnum > 0 and not attisdropped
    where relnamespace = to_regnamespace($1) and relkind in ('v', 'm', 'r') order by relname, attnum
"""


class ViewColumn(NamedTuple):
    """A column of a view, with the SQL type as `format_type` writes it."""

    view: str
    view_comment: str
    name: str
    type: str
    comment: str


async def load_view_columns(connection: Connection, schema: str) -> list[ViewColumn]:
    """Return the columns of all views of a schema, by view in the order of their names."""
    return [ViewColumn(*row) for row in await connection.fetch(_COLUMNS, schema)]
