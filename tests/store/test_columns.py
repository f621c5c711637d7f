"""Conversions between `Repo` and the table `repo`, and the definition of a visible repo."""

from itertools import product

import asyncpg
import pytest

from indexer.store import Store
from indexer.store.columns import storable, visible
from indexer.sync.changes import visibility_of
from tests.store.repo_rows import did, insert, put, synchronized


@pytest.mark.parametrize(("active", "takedown"), [*product([False, True], repeat=2)])
@pytest.mark.parametrize("hosting_status", [None, "deactivated", "deleted"])
async def test_python_sql_and_views_agree_on_visible_repos(
    store: Store, sql: asyncpg.Connection, hosting_status: str | None, *, active: bool, takedown: bool
) -> None:
    repo = synchronized(1, active=active, takedown=takedown, hosting_status=hosting_status)
    await insert(store, repo, changes=(put("app.test/a"),))
    await sql.execute("update indexer.record set original = 'abc'")
    expected = active and not takedown
    assert repo.visible is visibility_of(repo).visible is expected
    conditions = f"select {visible('r')}, not {visible('r')} from indexer.repo r"  # noqa: S608
    assert tuple(await sql.fetchrow(conditions) or ()) == (expected, not expected)
    assert await sql.fetchval("select visible from atproto.repos") is expected
    assert await sql.fetchval("select count(*) from atproto.records") == expected
    found = await sql.fetchval("select atproto.record_bytes($1, 'app.test', 'a')", did(1))
    assert found == (b"abc" if expected else None)
    report = await store.repo_report(did(1))
    assert report is not None
    assert report["visible"] is expected


@pytest.mark.parametrize(
    ("text", "expected"), [("a\0b", "a\ufffdb"), ("\ud800", "?"), ("é 🦋", "é 🦋"), ("", ""), (None, None)]
)
def test_text_from_outside_is_made_storable(text: str | None, expected: str | None) -> None:
    assert storable(text) == expected
