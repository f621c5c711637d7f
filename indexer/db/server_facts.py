"""Facts about a database server that decide whether the daemon works well with it: the data of `indexer doctor`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from time import time

from indexer.db.database_errors import connect, opening, without_password
from indexer.db.gaps import load_cursors
from indexer.db.layout import load_layout
from indexer.db.schema_version import SchemaState, schema_state
from indexer.sync.shard import PLAIN, Layout
from indexer.sync.stream import merged

SETTINGS = (
    "server_version",
    "fsync",
    "full_page_writes",
    "autovacuum",
    "synchronous_commit",
    "jit",
    "huge_pages_status",
    "max_connections",
    "superuser_reserved_connections",
)
SIZES = ("shared_buffers", "max_wal_size")

_FACTS = """
    select (select jsonb_object_agg(name, coalesce(current_setting(name, true), 'unknown'))
            from unnest($1::text[]) name)::text,
        (select jsonb_object_agg(name, pg_size_bytes(current_setting(name))) from unnest($2::text[]) name)::text,
        date_part('epoch', clock_timestamp())
"""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server as a new session sees it.

    Attributes:
        address: The connection string without passwords.
        settings: The values of `SETTINGS`; `unknown` if the server is too old for the setting.
        sizes: The values of `SIZES`, in bytes.
        clock_ahead: Seconds by which the clock of the server is ahead of the one of this machine.
        schema: The version of the schema, and a privilege that the role lacks.
        cursors: The position in the stream of each relay up to which all buckets were processed; empty if the schema is
            not current.
        layout: The layout of the database; `PLAIN` if the schema is not current.
    """

    address: str
    settings: Mapping[str, str]
    sizes: Mapping[str, int]
    clock_ahead: float
    schema: SchemaState
    cursors: Mapping[str, int]
    layout: Layout


async def load_server_facts(dsn: str) -> ServerFacts:
    """Read the facts. Nothing is written.

    Raises:
        SettingsError: The operator has to correct the URL, the password or a privilege, or the server is too old.
        DatabaseError: The database is unavailable.
    """
    schema = await schema_state(dsn)
    with opening(dsn):
        connection = await connect(dsn)
        try:
            asked_at = time()
            [(settings, sizes, server_time)] = await connection.fetch(_FACTS, SETTINGS, SIZES)
            answered_at = time()
            readable = schema.is_current and schema.missing is None
            cursors = await load_cursors(connection) if readable else []
            layout = await load_layout(connection) if readable else PLAIN
        finally:
            await connection.close()
    return ServerFacts(
        without_password(dsn),
        json.loads(settings),
        json.loads(sizes),
        server_time - (asked_at + answered_at) / 2,
        schema,
        {
            relay: merged([cursor for cursor in cursors if cursor.relay == relay])[0].seq
            for relay in {cursor.relay for cursor in cursors}
        },
        layout,
    )
