"""Crawl progress, and the comparison of repo lists with the stored repos."""

from dataclasses import replace

from indexer.db import Database
from indexer.db.crawls import CrawlProgress, ListDifferences
from indexer.reasons import Desync
from indexer.sync.repo import TOMBSTONED, Repo, SyncStatus
from indexer.sync.scope import Scope, Track
from tests.db.repo_rows import did, head, insert, synchronized

OLD, STORED, NEWER = "3laaaaaaaaa22", "3laaaaaaaab22", "3laaaaaaaac22"


async def test_differences_are_repos_that_are_behind_and_repos_that_are_hidden(db: Database) -> None:
    stored = {
        name: synchronized(name, head=head(STORED)) for name in ("newer", "same", "older", "hidden", "broken", "gone")
    }
    stored["hidden"] = stored["hidden"]._replace(active=False)
    stored["gone"] = stored["gone"]._replace(active=False, hosting_status=TOMBSTONED)
    stored["broken"] = stored["broken"]._replace(sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.NEW)
    stored["announced"] = Repo(did("announced"), version=1, from_stream=True)
    stored["announced and fetched"] = synchronized("announced and fetched", head=head(STORED), from_stream=True)
    await insert(db, *stored.values())
    listed = {
        **dict.fromkeys(("announced", "newer", "hidden", "broken", "gone", "unknown"), NEWER),
        "announced and fetched": STORED,
        "same": STORED,
        "older": OLD,
    }
    differences = await db.crawls.find_differences({did(name): rev for name, rev in listed.items()})
    assert differences == ListDifferences([did("newer")], [did("hidden")], [did("unknown")], [did("announced")])
    assert await db.crawls.find_differences({}) == ListDifferences([], [], [], [])


async def test_progress_is_stored_per_purpose_source_and_collection(db: Database) -> None:
    one = CrawlProgress("discover", "https://a.example", "com.example.a", "x", 5, 2, began_at=7.5)
    other = replace(one, purpose="sweep", collection="", cursor=None, finished_at=8.25)
    await db.crawls.save(one)
    await db.crawls.save(other)
    assert await db.crawls.progress("discover", "https://a.example", "com.example.a") == one
    assert await db.crawls.progress("sweep", "https://a.example") == other
    assert await db.crawls.progress("discover", "https://a.example") is None
    await db.crawls.save(after := one.after_page("y", 10, 3, 9.0))
    assert await db.crawls.progress("discover", "https://a.example", "com.example.a") == after
    assert (after.cursor, after.listed, after.found, after.finished_at) == ("y", 15, 5, None)
    assert after.after_page(None, 1, 0, 9.0).finished_at == 9.0


async def test_page_for_a_former_scope_adds_nothing_and_only_that_of_a_signal_is_not_stored(db: Database) -> None:
    former = await db.scope.begin(Scope(track=Track.ALL))
    await db.scope.change(track=Track.LISTED)
    sweep = CrawlProgress("sweep", "https://relay.test", cursor="next", found=3, began_at=1.0)
    signal = replace(sweep, purpose="signal", collection="app.test")
    assert await db.crawls.add_listed([did("a")], sweep, scope=former) == sweep
    assert await db.crawls.add_signals([did("a")], signal, former) is None
    assert await db.repos.load([did("a")]) == {}
    assert await db.crawls.progress("sweep", sweep.source) == sweep
    assert await db.crawls.progress("signal", sweep.source, "app.test") is None
