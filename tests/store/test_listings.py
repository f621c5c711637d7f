"""What lists of accounts say of the repos that we hold."""

from dataclasses import replace

from indexer.reasons import Desync
from indexer.store import Store
from indexer.sync.listing import Listing
from indexer.sync.planning import TOMBSTONED
from indexer.sync.repo import SyncStatus
from tests.store.rows import did, head, insert, synchronized

OLD, OURS, NEWER = "3laaaaaaaaa22", "3laaaaaaaab22", "3laaaaaaaac22"


async def test_who_is_behind_and_who_is_hidden(store: Store) -> None:
    ours = {
        name: synchronized(name, head=head(OURS)) for name in ("newer", "same", "older", "hidden", "broken", "gone")
    }
    ours["hidden"] = replace(ours["hidden"], active=False)
    ours["gone"] = replace(ours["gone"], active=False, hosting_status=TOMBSTONED)
    ours["broken"] = replace(ours["broken"], status=SyncStatus.DESYNCHRONIZED, reason=Desync.NEW)
    await insert(store, *ours.values())
    listed = {
        "newer": NEWER,
        "same": OURS,
        "older": OLD,
        "hidden": NEWER,
        "broken": NEWER,
        "gone": NEWER,
        "unknown": NEWER,
    }
    different = await store.different({did(name): rev for name, rev in listed.items()})
    assert different == ([did("newer")], [did("hidden")])
    assert await store.different({}) == ([], [])


async def test_a_listing_is_kept_by_purpose_source_and_collection(store: Store) -> None:
    one = Listing("discover", "https://a.example", "com.example.a", "x", 5, 2, began_at=7.5)
    other = replace(one, purpose="sweep", collection="", cursor=None, finished_at=8.25)
    await store.save_listing(one)
    await store.save_listing(other)
    assert await store.listing("discover", "https://a.example", "com.example.a") == one
    assert await store.listing("sweep", "https://a.example") == other
    assert await store.listing("discover", "https://a.example") is None
    await store.save_listing(after := one.after("y", 10, 3, 9.0))
    assert await store.listing("discover", "https://a.example", "com.example.a") == after
    assert (after.cursor, after.listed, after.found, after.finished_at) == ("y", 15, 5, None)
    assert after.after(None, 1, 0, 9.0).finished_at == 9.0
