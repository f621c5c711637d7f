"""Databases for tests: one server of our own a session, a migrated database a test, copied from a template."""

import asyncio
import os
import secrets
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from hypothesis import settings

from indexer.store import Store, embedded

T = TypeVar("T")
settings.register_profile("quick", max_examples=20)  # for `make check`

QUICK = {"fsync": "off", "shared_buffers": "64MB", "synchronous_commit": "off", "max_connections": "200"}


class Server:
    """A Postgres and a thread with a loop, so that synchronous fixtures can talk to it. While a test runs, the database
    of the next one is made, and that of the one before dropped.
    """

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postgres fixtures", daemon=True)
        self._thread.start()
        self._context = embedded.database(os.environ.get("INDEXER_TEST_DATABASE_URL"), directory, QUICK)
        self.dsn = self.run(self._context.__aenter__())
        self._name = f"test_{secrets.token_hex(4)}"  # the server may be one that others test on, too
        self._numbers = count()
        self._template: str | None = None
        self._next: Future[str] | None = None
        self._drops: list[Future[None]] = []

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._begin(coroutine).result(timeout=120)

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        if self._next is not None:
            self.drop(self._next.result(timeout=120))
        if self._template is not None:
            self.drop(self._named(self._template))
        for drop in self._drops:
            drop.result(timeout=120)
        self.run(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def create(self, *, migrated: bool) -> str:
        if not migrated:
            return self.run(self._create("template0"))
        made = self._next or self._begin(self._create(self.template()))
        dsn = made.result(timeout=120)
        self._next = self._begin(self._create(self.template()))
        return dsn

    def drop(self, dsn: str) -> None:
        self._drops.append(self._begin(self._execute(f"drop database {urlsplit(dsn).path[1:]} with (force)")))

    async def _create(self, template: str) -> str:
        name = f"{self._name}_{next(self._numbers)}"
        await self._execute(f"create database {name} template {template}")
        return self._named(name)

    def template(self) -> str:
        if self._template is None:
            from indexer.store.migrate import migrate  # noqa: PLC0415 - what the migration imports is under test

            name = f"{self._name}_template"
            self.run(self._execute(f"create database {name} template template0"))
            self.run(migrate(self._named(name)))
            self._template = name
        return self._template

    def _named(self, name: str) -> str:
        return urlunsplit(urlsplit(self.dsn)._replace(path=f"/{name}"))

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self.dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("postgres"))
    yield server
    server.close()


@pytest.fixture
def database(postgres: Server) -> Iterator[str]:
    """The DSN of an empty database at the schema's head."""
    dsn = postgres.create(migrated=True)
    yield dsn
    postgres.drop(dsn)


@pytest.fixture
def empty_database(postgres: Server) -> Iterator[str]:
    """The DSN of a database without our schema."""
    dsn = postgres.create(migrated=False)
    yield dsn
    postgres.drop(dsn)


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    store = await Store.open(database, connections=5)
    yield store
    await store.close()


@pytest.fixture
async def sql(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection beside the store's."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()
