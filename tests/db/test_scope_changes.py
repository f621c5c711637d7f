"""Repos that a narrower scope does not want are untracked, page by page; all others stay."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from time import time

import asyncpg
import pytest

from indexer.atproto.syntax import CollectionFilter
from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import Shard
from tests.db.change_log_helpers import after
from tests.db.repo_rows import did, in_progress, insert, put, synchronized

pytestmark = pytest.mark.slow

SHARD = Shard()
LIKE, POST = "app.bsky.feed.like", "app.bsky.feed.post"


async def read_lists(db: Database, scope: Scope, **listed: Sequence[str]) -> None:
    """Store that the list of each signal collection was read, with these repos."""
    for collection in scope.signal_patterns:
        progress = CrawlProgress("signal", "https://relay.test", collection, began_at=time(), finished_at=time())
        for dids in listed.values():
            assert await db.crawls.add_signals(dids, progress, scope)
        await db.crawls.save(progress)


async def untrack_all(db: Database, scope: Scope, limit: int = 2) -> CrawlProgress:
    """Look at all repos once; return the progress."""
    progress = await db.scope_changes.begin_untracking(SHARD)
    while progress.finished_at is None:
        page = await db.scope_changes.untrack_page(scope, SHARD, progress, limit)
        assert page is not None
        _, progress = page
        if progress.cursor is None:
            break
    return progress


async def tracked(db: Database, *names: object) -> set[object]:
    repos = await db.repos.load([did(name) for name in names])
    return {name for name in names if did(name) in repos and repos[did(name)].tracked}


async def test_only_repos_that_commands_named_stay_if_the_scope_is_listed(
    db: Database, sql: asyncpg.Connection
) -> None:
    await db.scope.begin(Scope())
    await insert(db, synchronized("a", wanted_in=1), synchronized("b", wanted_in=1), changes=(put("app.test/x"),))
    await insert(db, Repo(did("c"), version=1, wanted_in=1))
    await db.scope.track([did("b"), did("d")])
    await db.crawls.add_listed([did("e")], CrawlProgress("discover", "https://pds.test"))
    scope = await db.scope.change(track=Track.LISTED)
    assert scope.repos_narrowed_in == scope.version == 2
    assert await db.scope_changes.count_not_chosen() == 2
    assert (await untrack_all(db, scope)).finished_at is not None
    assert await tracked(db, *"abcde") == set("bde")
    assert {row["did"] for row in await sql.fetch("select did from atproto.records")} == {did("b")}
    erased = await db.repos.erase_batch(range(256), 1e12)
    while erased is not None:
        erased = await db.repos.erase_batch(range(256), 1e12)
    log = [(row["action"], row["did"]) for row in await after(sql) if row["action"] in {"hidden", "delete", "visible"}]
    assert sorted(log) == sorted([("hidden", did("a")), ("hidden", did("c")), ("delete", did("a"))])
    assert await db.resyncs.forget_hidden(range(256), -10.0, time()) == 2, "what is out of scope leaves no row"


async def test_stored_signals_lists_and_commands_keep_a_repo(db: Database) -> None:
    await db.scope.begin(Scope())
    await insert(db, synchronized("stored", wanted_in=1), changes=(put(f"{LIKE}/x"),))
    await insert(db, synchronized("other", wanted_in=1), changes=(put(f"{POST}/x"), put("app.bsky.feed/x")))
    await insert(db, synchronized("listed", wanted_in=1), Repo(did("new"), version=1, wanted_in=1))
    await db.scope.track([did("chosen")])
    scope = await db.scope.change(track=Track.SIGNAL, signal_collections=[LIKE])
    assert await db.scope_changes.unread_lists(scope) == [LIKE]
    await read_lists(db, scope, signal=[did("listed"), did("unknown")])
    assert await db.scope_changes.unread_lists(scope) == []
    await insert(db, Repo(did("live"), version=1, wanted_in=scope.version))
    assert (await untrack_all(db, scope)).finished_at is not None
    names = ("stored", "other", "listed", "new", "chosen", "unknown", "live")
    assert await tracked(db, *names) == {"stored", "listed", "chosen", "unknown", "live"}


async def test_pattern_without_a_list_is_decided_by_complete_repos_only(db: Database) -> None:
    await db.scope.begin(Scope())
    await insert(db, synchronized("stored", wanted_in=1), changes=(put(f"{LIKE}/x"),))
    await insert(db, synchronized("neighbour", wanted_in=1), changes=(put("app.bsky.feeds.x/x"),))
    await insert(db, synchronized("none", wanted_in=1), Repo(did("new"), version=1, wanted_in=1))
    await in_progress(db, "fetched", wanted_in=1)
    scope = await db.scope.change(track=Track.SIGNAL, signal_collections=["app.bsky.feed.*"])
    assert await db.scope_changes.unread_lists(scope) == []
    progress = await untrack_all(db, scope)
    assert (progress.finished_at, progress.cursor) == (None, None), "two repos are looked at again"
    names = ("stored", "neighbour", "none", "new", "fetched")
    assert await tracked(db, *names) == {"stored", "new", "fetched"}
    assert not scope.unlisted_signals
    assert (await db.scope.change(collections=[POST])).unlisted_signals == ["app.bsky.feed.*"]
    await insert(db, synchronized("one", wanted_in=1), changes=(put("zz.test/x"),))
    await insert(db, synchronized("empty", wanted_in=1))
    await untrack_all(db, await db.scope.change(track=Track.SIGNAL, signal_collections=["*"]))
    assert await tracked(db, "one", "empty", *names) == {"one", "stored", "new", "fetched"}, "any record is a signal"


async def test_changed_scope_ends_the_search_and_tracks_what_it_wants_again(db: Database) -> None:
    await db.scope.begin(Scope())
    await insert(db, *(synchronized(name, wanted_in=1) for name in "abcd"))
    narrow = await db.scope.change(track=Track.LISTED)
    page = await db.scope_changes.untrack_page(narrow, SHARD, await db.scope_changes.begin_untracking(SHARD), 2)
    assert page is not None
    untracked, progress = page
    assert untracked == 2
    signal = await db.scope.change(track=Track.SIGNAL, signal_collections=[LIKE])
    assert await db.scope_changes.untrack_page(narrow, SHARD, progress, 2) is None
    assert await db.crawls.add_signals([did("a")], progress, narrow) is None
    assert signal.repos_narrowed_in == narrow.version, "repos that only the first scope wanted are still untracked"
    await read_lists(db, signal, signal=[did("a"), did("c")])
    await untrack_all(db, signal)
    assert await tracked(db, *"abcd") == {"a", "c"}
    wide = await db.scope.change(track=Track.ALL)
    assert wide.repos_narrowed_in == 0
    assert (await db.crawls.find_differences({did("b"): "3l"})).unknown == [did("b")]
    await db.scope.untrack([did("d")])
    await db.crawls.add_listed([did("b"), did("d")], progress, scope=wide)
    assert await tracked(db, *"abcd") == {"a", "b", "c"}, "what an operator untracked stays untracked"


async def test_signal_that_is_removed_wants_fewer_repos_unless_another_covers_it(db: Database) -> None:
    await db.scope.begin(Scope(track=Track.SIGNAL, signal_collections=CollectionFilter([LIKE])))
    assert (await db.scope.change(signal_collections=[LIKE, POST])).repos_narrowed_in == 0
    assert (await db.scope.change(signal_collections=["app.bsky.*"])).repos_narrowed_in == 0
    assert (await db.scope.change(signal_collections=["app.bsky.feed.*"])).repos_narrowed_in == 4
    assert (await db.scope.change(collections=[POST])).repos_narrowed_in == 4
    assert (await db.scope.change(track=Track.ALL)).repos_narrowed_in == 0


CHANGES: list[tuple[Track, list[str]]] = [
    (Track.ALL, [LIKE]), (Track.LISTED, [LIKE]), (Track.SIGNAL, [LIKE]), (Track.SIGNAL, [POST]),
    (Track.SIGNAL, [LIKE, POST]), (Track.SIGNAL, ["app.bsky.*"]), (Track.SIGNAL, ["app.bsky.feed.*"]),
]  # fmt: skip


async def test_database_and_program_agree_which_changes_want_fewer_repos(db: Database) -> None:
    before = await db.scope.begin(Scope(signal_collections=CollectionFilter([LIKE])))
    random = Random(3)
    for _ in range(60):
        track, signals = random.choice(CHANGES)
        changed = await db.scope.change(track=track, signal_collections=signals)
        if changed.version != before.version:
            fewer = changed.repos_narrowed_in == changed.version
            assert fewer == changed.may_want_fewer_repos(replace(before)), (before, changed)
        before = changed
