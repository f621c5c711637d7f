"""The stored scope: the first one, changes by SQL and by commands, and untracked repos."""

from random import Random

import asyncpg
import pytest

from indexer.atproto.syntax import CollectionFilter, is_did
from indexer.db import Database
from indexer.db.scope import CurrentScope
from indexer.errors import InvalidScopeError
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.repo import CHOSEN, Repo, SyncStatus
from indexer.sync.scope import Scope, Track, filter_of
from tests.background import changed_before
from tests.db.change_log_helpers import after
from tests.db.repo_rows import buffer_event, did, in_progress, insert, put, synchronized
from tests.sync.signing_account import STORE_ALL

pytestmark = pytest.mark.slow

POSTS = Scope(collections=CollectionFilter(["app.bsky.feed.post"]))


async def test_first_scope_is_stored_once(db: Database, sql: asyncpg.Connection) -> None:
    assert await db.scope.load() is None
    with pytest.raises(InvalidScopeError, match="no scope is stored yet"):
        await db.scope.change(collections=["*"])
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError):
        await sql.execute("select atproto.set_track('listed')")
    first = await db.scope.begin(Scope(track=Track.LISTED, collections=CollectionFilter(["b.b.b", "a.a.*"])))
    assert (first.version, first.track, first.collections.patterns) == (1, Track.LISTED, ("a.a.*", "b.b.b"))
    assert first.complete_from == 0
    again = await db.scope.begin(POSTS)
    assert again.same_choice(first)
    assert again.version == 1


async def test_scope_that_was_read_earlier_does_not_replace_a_later_one(db: Database) -> None:
    current = CurrentScope(db.scope, STORE_ALL)
    await current.begin()
    await db.scope.change(collections=["a.a.*"])

    async def change(_: Scope) -> None:
        await db.scope.change(collections=["b.b.*"])
        await current.refresh()

    async with changed_before(db.scope, "load", change):
        await current.refresh()
    assert current.scope.version == 3


async def test_patterns_remember_the_version_that_added_them(db: Database) -> None:
    await db.scope.begin(POSTS)
    wide = await db.scope.change(collections=["app.bsky.*", "app.bsky.feed.post"])
    assert (wide.version, wide.collections.patterns, wide.added_in) == (2, ("app.bsky.*", "app.bsky.feed.post"), (2, 0))
    assert (wide.complete_from, wide.added_after(1), wide.added_after(2)) == (2, ["app.bsky.*"], [])
    narrow = await db.scope.change(collections=["app.bsky.feed.like", "app.bsky.feed.post"])
    assert (narrow.version, narrow.added_in) == (3, (2, 0)), "the wide pattern covers the narrow one"
    same = await db.scope.change(collections=["app.bsky.feed.post", "app.bsky.feed.like", "app.bsky.feed.post"])
    assert same.version == 3, "the same patterns are no change"
    assert (await db.scope.change(collections=["app.bsky.feed.like"])).added_in == (2,)
    assert (await db.scope.change(collections=["app.bsky.feed.like", "app.bsky.feed.post"])).added_in == (2, 5)


async def test_scope_is_changed_by_sql(db: Database, sql: asyncpg.Connection) -> None:
    await db.scope.begin(POSTS)
    assert await sql.fetchval("select atproto.set_collections(array['a.a.*'])") == 2
    assert await sql.fetchval("select atproto.set_signal_collections(array['a.a.a', 'a.b.*'])") == 3
    assert await sql.fetchval("select atproto.set_track('signal')") == 4
    scope = await db.scope.load()
    assert scope is not None
    assert str(scope) == "repos signal, collections a.a.*, signal collections a.a.a,a.b.*"


INVALID = [
    ("set_collections", [], "no collection is named; use * for all collections"),
    ("set_collections", ["app.bsky.feed.post", "posts"], "'posts' is neither an NSID"),
    ("set_collections", ["app.bsky*"], "'app.bsky*' is neither an NSID"),
    ("set_collections", [None], "null is neither an NSID"),
    ("set_signal_collections", [""], "'' is neither an NSID"),
    ("set_track", "some", "'some' is not a way to track repos; use all, listed or signal"),
    ("set_track", "signal", "no signal collection is named"),
    ("track", [did(1), "did:x"], "'did:x' is not a DID"),
    ("untrack", ["at://did:plc:a"], "'at://did:plc:a' is not a DID"),
]


async def test_invalid_argument_changes_nothing_and_is_named(db: Database, sql: asyncpg.Connection) -> None:
    await db.scope.begin(POSTS)
    for function, argument, message in INVALID:
        with pytest.raises(asyncpg.InvalidParameterValueError) as error:
            await sql.fetchval(f"select atproto.{function}($1)", argument)
        assert str(error.value).startswith(message)
    with pytest.raises(
        InvalidScopeError, match=r"^'x' is neither an NSID, nor the beginning of one with \.\*, nor \*$"
    ):
        await db.scope.change(collections=["x"])
    with pytest.raises(InvalidScopeError, match=r"^'x' is not a DID$"):
        await db.scope.untrack(["x"])
    scope = await db.scope.load()
    assert scope is not None
    assert scope.version == 1
    assert await sql.fetchval("select count(*) from indexer.repo") == 0


EDGES = [
    *("*", "a", "a.b", "a.b.c", "a.*", "a.b.*", "1.b.c", "a.1.c", "a.b.1", "a.b.c1", "a.b.c-d", "a-.b.c", ".*", "a..c"),
    *("a.b.c\n", "a.b.c.*\n", "**", "a.b*", "*.b.c", "ä.b.c", "", " a.b.c", "a.b." + "c" * 63, "a.b." + "c" * 64),
    *("a." * 157 + "abc", "a." * 158 + "abc", "a." * 157 + "*", "a." * 158 + "*", "a." + "b" * 63 + ".c"),
]


DIDS = (
    *("did:plc:a", "did:web:a.b", "did:x:", "did:x:a:", "did:X:a", "did:x:a\n", "did:x:a%3A", "x"),
    "did:x:" + "a" * 2043,
)


async def test_database_and_program_accept_the_same_patterns_and_dids(sql: asyncpg.Connection) -> None:
    random = Random(7)
    made = ["".join(random.choices("ab1-.*", k=random.randint(1, 9))) for _ in range(400)]
    for pattern in [*EDGES, *made]:
        assert await accepts(sql, "checked_patterns", pattern) == is_pattern(pattern), pattern
    for text in DIDS:
        assert await accepts(sql, "checked_dids", text) == is_did(text), text


def is_pattern(text: str) -> bool:
    try:
        return filter_of([text]) is not None
    except ValueError:
        return False


async def accepts(sql: asyncpg.Connection, function: str, text: str) -> bool:
    try:
        await sql.fetchval(f"select indexer.{function}(array[$1::text])", text)
    except asyncpg.InvalidParameterValueError:
        return False
    return True


async def test_untracked_repo_is_hidden_and_leaves_the_queue_and_the_buffer(
    db: Database, sql: asyncpg.Connection
) -> None:
    claimed = await in_progress(db, 1)
    await buffer_event(db, claimed, put("app.test/a"))
    await insert(db, Repo(did("waits"), version=1))

    assert await db.scope.untrack([did(1), did("waits"), did("unknown")]) == 2
    assert await db.scope.untrack([did(1), did("unknown")]) == 0
    for table in ("atproto.repos", "atproto.records", "indexer.buffered_event"):
        assert await sql.fetch(f"table {table}") == []
    assert not await db.resyncs.renew(did(1), claimed.lease, 10.0), "the worker finds its claim lost"
    assert await db.resyncs.claim(10, range(256), 10.0, 1e12) == []
    repos = await db.repos.load([did(1), did("waits"), did("unknown")])
    assert {repo.tracked for repo in repos.values()} == {False}
    assert not await db.repos.request_resyncs([did(1)])


async def test_records_of_an_untracked_repo_are_erased_and_fetched_again_after_it_is_tracked(
    db: Database, sql: asyncpg.Connection
) -> None:
    await insert(db, synchronized(1), changes=(put("app.test/a"), put("app.test/b")))
    assert await db.scope.untrack([did(1)]) == 1
    erased = await db.repos.erase_batch(range(256), 1e12)
    assert erased is not None
    assert (erased.did, erased.records, erased.finished) == (did(1), 2, True)
    assert await db.resyncs.forget_hidden(range(256), 0.0, 1e12) == 0, (
        "the row keeps messages from adding the repo again"
    )
    assert await db.scope.track([did(1), did(2), did(2)]) == 2
    assert await db.scope.track([did(2)]) == 0
    assert (await db.repos.load([did(2)]))[did(2)] == Repo(did(2), version=1, wanted_in=CHOSEN)
    actions = [(row["action"], row["rkey"]) for row in await after(sql)]
    of_repo = [action for action, _ in actions if action in {"hidden", "visible", "delete"}]
    assert of_repo == ["hidden", "delete", "delete", "visible"]
    [repo] = (await db.repos.load([did(1)])).values()
    assert (repo.sync_status, repo.active, repo.tracked, repo.head) == (SyncStatus.DESYNCHRONIZED, True, True, None)
    assert {repo.did for repo in await db.resyncs.claim(10, range(256), 10.0, 1e12)} == {did(1), did(2)}


async def test_write_that_was_planned_before_the_repo_was_untracked_is_skipped(db: Database) -> None:
    await insert(db, synchronized(1))
    await db.scope.untrack([did(1), did("new")])
    known = RepoWrite(synchronized(1), synchronized(1, version=2), (put("app.test/a"),))
    new = RepoWrite(Repo(did("new")), Repo(did("new"), version=1))
    assert (await db.write(Batch((known, new)))).skipped == {did(1), did("new")}


async def test_progress_counts_the_repos_that_are_complete(db: Database) -> None:
    assert await db.scope.progress() == []
    await db.scope.begin(POSTS)
    await db.scope.change(collections=["app.bsky.feed.post", "app.bsky.feed.like"])
    await insert(
        db, synchronized(1), synchronized(2, scope_version=2), Repo(did(3), version=1), Repo(did(4), version=1)
    )
    await insert(db, synchronized(5, active=False))
    await db.scope.untrack([did(4)])
    assert [tuple(row) for row in await db.scope.progress()] == [
        ("app.bsky.feed.like", 2, True, 3, 1),
        ("app.bsky.feed.post", 0, False, 3, 2),
    ]
