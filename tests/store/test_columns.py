"""Conversions between `Repo` and the table `repo`, and the definition of a visible repo."""

from itertools import product

import asyncpg
import pytest

from indexer.store import Store
from indexer.store.columns import storable, visible
from indexer.sync.changes import visibility_of
from tests.store.repo_rows import insert, put, synchronized


async def test_python_sql_and_views_agree_on_visible_repos(store: Store, sql: asyncpg.Connection) -> None:
    repos = [
        synchronized(number, active=active, takedown=takedown, hosting_status=hosting_status)
        for number, (active, takedown, hosting_status) in enumerate(
            product([False, True], [False, True], [None, "deactivated", "deleted"])
        )
    ]
    await insert(store, *repos, changes=(put("app.test/a"),))
    await sql.execute("update indexer.record set original = 'abc'")
    conditions = f"select {visible('r')}, not {visible('r')} from indexer.repo r where did = $1"  # noqa: S608
    for repo in repos:
        expected = repo.active and not repo.takedown
        assert repo.visible is visibility_of(repo).visible is expected
        assert tuple(await sql.fetchrow(conditions, repo.did) or ()) == (expected, not expected)
        assert await sql.fetchval("select visible from atproto.repos where did = $1", repo.did) is expected
        assert await sql.fetchval("select count(*) from atproto.records where did = $1", repo.did) == expected
        found = await sql.fetchval("select atproto.record_bytes($1, 'app.test', 'a')", repo.did)
        assert found == (b"abc" if expected else None)
        report = await store.repo_report(repo.did)
        assert report is not None
        assert report["visible"] is expected


@pytest.mark.parametrize(
    ("text", "expected"), [("a\0b", "a\ufffdb"), ("\ud800", "?"), ("é 🦋", "é 🦋"), ("", ""), (None, None)]
)
def test_text_from_outside_is_made_storable(text: str | None, expected: str | None) -> None:
    assert storable(text) == expected
