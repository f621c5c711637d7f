"""The progress of links, as `indexer status`, the status page and the metrics show it."""

import asyncpg
import pytest

from indexer.store import LinkProgress, Store, link_progress
from indexer.store.link_progress import share_before
from tests.store.link_steps import ALL, like, settle, turn_on
from tests.store.repo_rows import insert, synchronized


@pytest.mark.parametrize(
    ("did", "share"),
    [
        ("", 0.0),
        ("did:key:z", 0.0),
        ("did:plc:2", 0.0),
        ("did:plc:a", 6 / 32),
        ("did:plc:jaaaaaaaaaaaaaaaaaaaaaaa", 15 / 32 + 6 / 32**2 + 6 / 32**3),
        ("did:plc:zzzzzzzzzzzzzzzzzzzzzzzz", 1.0),
        ("did:plc:~", 1.0),
        ("did:web:example.com", 1.0),
    ],
)
def test_the_place_of_a_did_among_all_is_estimated(did: str, share: float) -> None:
    assert share_before(did) == pytest.approx(share, abs=1e-4)


def test_the_estimate_grows_with_the_did() -> None:
    dids = sorted(f"did:plc:{first}{second}x" for first in "27az" for second in "27amz")
    shares = [share_before(did) for did in dids]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


@pytest.mark.slow
async def test_progress_of_links_in_each_state(store: Store, sql: asyncpg.Connection) -> None:
    assert (await store.counts()).links == LinkProgress()
    await insert(store, synchronized(1), changes=(like("a"),))
    await store.turn_links_on(ALL)
    links = (await store.counts()).links
    assert (links.state, links.progress, links.repos_done) == ("backfill", 0.0, 0)
    assert links.enabled_at is not None
    await sql.execute("update indexer.link_bucket set backfilled_to = 'did:plc:j2', backfilled_repos = 2")
    links = (await store.counts()).links
    assert (links.state, links.progress, links.repos_done) == ("backfill", 15 / 32, 512)
    await turn_on(store)
    await settle(store)
    links = (await store.counts()).links
    assert (links.state, links.progress, links.open_deltas) == ("complete", 1.0, 0)
    await store.turn_links_off(range(10))
    assert (await store.counts()).links.state == "outdated"
    await store.turn_links_off(ALL)
    assert (await store.counts()).links == LinkProgress()


@pytest.mark.slow
async def test_open_deltas_and_recounts_are_counted_up_to_a_limit(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await turn_on(store)
    await insert(store, synchronized(1), changes=(like("a", "one"), like("b", "two"), like("c", "three")))
    await sql.execute("select atproto.request_takedown(did, true) from indexer.repo")
    links = (await store.counts()).links
    assert (links.open_deltas, links.open_recounts) == (3, 1)
    monkeypatch.setattr(link_progress, "MAX_OPEN", 2)
    assert (await store.counts()).links.open_deltas == 2
