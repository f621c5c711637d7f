"""Connections return to the pool without a query: no statement changes a session beyond its transaction."""

import re
from pathlib import Path

import asyncpg

import indexer.store
from indexer.store import Store

CHANGES_A_SESSION = re.compile(
    r"""(?:^|["';]\s*)(?:set\s+(?!local\b)\w+\s*(?:=|to\b)|listen\s|create\s+temp|declare\s)
    |set_config\(|pg_(?:try_)?advisory_lock""",
    re.VERBOSE,
)


def test_pattern_finds_statements_that_change_a_session() -> None:
    for statement in ('"set lock_timeout = 1"', "'select 1; set jit to off'", '"listen x"', "pg_advisory_lock(1)"):
        assert CHANGES_A_SESSION.search(statement), statement
    for statement in ('"set local lock_timeout = 1"', '"update x set a = 1"', "'notify x'"):
        assert not CHANGES_A_SESSION.search(statement), statement


def test_no_statement_changes_a_session() -> None:
    files = list(Path(indexer.store.__file__).parent.glob("**/*.py"))
    assert len(files) > 40
    found = [(path.name, match[0]) for path in files for match in CHANGES_A_SESSION.finditer(path.read_text())]
    assert not found


async def test_connection_returns_to_the_pool_without_a_query(store: Store, sql: asyncpg.Connection) -> None:
    await store.repos(["did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"])
    last = await sql.fetch(
        "select query from pg_stat_activity where application_name = 'indexer' and datname = current_database()"
    )
    assert [("from indexer.repo" in row["query"]) for row in last] == [True]
