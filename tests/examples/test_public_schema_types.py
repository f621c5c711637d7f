"""The generated client types of the public schema fit the database. tests/docs/ checks that they are current."""

import json
import re
import subprocess
from collections.abc import AsyncIterator
from importlib.util import module_from_spec, spec_from_file_location
from math import inf
from types import ModuleType
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from docs.generate import PROJECT
from indexer.db import Database
from indexer.sync.scope import Scope
from tests.db.repo_rows import did, insert, put, synchronized
from tests.feed_clients.node_process import HERE as NPM_DIRECTORY
from tests.feed_clients.node_process import needs_clients, node_process
from tests.realnet.real_network import NODE
from tests.waiting import until

CID = "bafkreihdwdcefgh4dqkjv67uzcmw7ojee6xedzdetojuzjevtenxquvyku"
DIRECTORY = PROJECT / "examples" / "public_schema"
NODE_POSTGRES_TYPES = {
    "DateOrInfinity": {"Date", "number"},
    "Int8": {"string"},
    "(string | null)[]": {"array"},
    "Json": {"object", "array", "string", "number", "boolean", "null"},
}
"""Types of values at run time, by declared type, if the two differ."""


@pytest.fixture(scope="module")
def models() -> ModuleType:
    spec = spec_from_file_location("atproto_models", DIRECTORY / "atproto_models.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def connection(database: str) -> AsyncIterator[AsyncConnection]:
    async def connect() -> asyncpg.Connection:
        return await asyncpg.connect(database)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect)
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


@pytest.mark.slow
async def test_rows_are_read_with_the_types_of_the_models(
    models: ModuleType, db: Database, connection: AsyncConnection
) -> None:
    await insert(db, synchronized(1), changes=(put("app.test/a", '{"a": [1]}'),))
    for mapper in models.PublicView.registry.mappers:
        await connection.execute(select(mapper.class_))
    [row] = await connection.execute(
        select(models.Record.did, models.Record.value, models.Record.indexed_at, models.Repo.visible)
        .join(models.Repo, models.Repo.did == models.Record.did)
        .where(models.Record.collection == "app.test")
    )
    assert (row.did, row.value, row.visible) == (did(1), {"a": [1]}, True)
    assert row.indexed_at.tzinfo is not None


def declared_types() -> dict[str, str]:
    """Return the declared type of each column, as in `changes.seq`."""
    text = (DIRECTORY / "atproto.ts").read_text()
    interfaces = dict(re.findall(r"(?s)export interface (\w+) \{\n(.*?)\n\}", text))
    views = dict(re.findall(r'"atproto\.(\w+)": (\w+);', interfaces.pop("Views")))
    assert set(views.values()) == interfaces.keys()
    return {
        f"{view}.{name}": type_
        for view, interface in views.items()
        for name, type_ in re.findall(r"(?m)^  (\w+): (.*);$", interfaces[interface])
    }


def values_of(declared: str) -> set[str]:
    """Return the types that values of a declared type may have at run time."""
    type_ = declared.removesuffix(" | null")
    return NODE_POSTGRES_TYPES.get(type_, {type_}) | ({"null"} if type_ != declared else set())


def connection_options(database: str) -> dict[str, str | int]:
    """Return the options of node-postgres for a database of the tests."""
    address = urlsplit(database)
    server = parse_qs(address.query)
    return {
        "user": address.username or "",
        "database": address.path[1:],
        "host": server["host"][0],
        "port": int(server["port"][0]),
    }


@pytest.mark.proof("clients")
@needs_clients
def test_typescript_types_compile_strictly_in_a_program_that_uses_node_postgres() -> None:
    compiler = NPM_DIRECTORY / "node_modules" / "typescript" / "bin" / "tsc"
    result = subprocess.run([NODE, compiler, "--project", NPM_DIRECTORY], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.proof("clients")
@needs_clients
async def test_node_postgres_returns_values_of_the_declared_typescript_types(
    db: Database, sql: asyncpg.Connection, database: str
) -> None:
    blob = {"$type": "blob", "ref": {"$link": CID}, "mimeType": "image/png", "size": 3}
    record = {"text": "hello", "image": blob, "subject": "did:plc:someone"}
    await insert(db, synchronized(1), changes=(put("app.test/a", json.dumps(record)),))
    await insert(db, synchronized(2, next_attempt_at=inf))
    await db.scope.begin(Scope())
    await sql.execute("select atproto.register_reader('app')")
    declared = declared_types()
    views = dict.fromkeys(f"atproto.{column.partition('.')[0]}" for column in declared)
    async with node_process("public_schema.ts", json.dumps(connection_options(database)), *views) as client:
        await until(lambda: bool(client.lines))
    [read] = client.lines
    newest = await sql.fetchrow("select seq, extract(year from time) from atproto.changes order by seq desc limit 1")
    assert newest is not None
    assert read["summary"] == f"{did(1)}: hello; change {newest[0]} in {newest[1]}"
    with_rows = {view.partition(".")[2] for view, rows in read["types"].items() if rows}
    assert with_rows >= {"blobs", "changes", "readers", "records", "repos", "link_progress", "scope_progress"}
    for view, rows in read["types"].items():
        for column, type_ in (item for row in rows for item in row.items()):
            assert type_ in values_of(declared[f"{view.partition('.')[2]}.{column}"]), (view, column)
