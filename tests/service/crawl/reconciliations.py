"""Reconciliations with one host, and repos to compare."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import asyncpg
import orjson

from indexer.identity import IdentityCache
from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient
from indexer.service.crawl.reconcile import Reconciliation, ReconciliationSettings
from indexer.service.current_scope import CurrentScope
from indexer.service.open_gaps import OpenGaps
from indexer.store import Store
from indexer.sync.crawl_progress import CrawlProgress
from indexer.sync.repo_state import Repo, StreamPoint
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import Shard
from tests.outbound.scripted_host import ScriptedHost, http_response
from tests.store.repo_rows import did, head, synchronized
from tests.sync.signing_account import STORE_ALL

OLDER, STORED, NEWER = "3laaaaaaaaa22", "3laaaaaaaab22", "3laaaaaaaac22"
DAY = 86_400.0
NO_WAIT = ReconciliationSettings(Shard(), interval=DAY, settle=0.0, poll=0.01, first_retry=0.01)
LONG_SETTLE = replace(NO_WAIT, settle=600.0)


def stored(name: object, **fields: Any) -> Repo:
    return synchronized(name, head=head(STORED), **fields)


def make_reconciliation(
    store: Any,
    outbound: OutboundClient,
    host: ScriptedHost,
    settings: ReconciliationSettings = NO_WAIT,
    *sources: str,
    identities: IdentityCache | None = None,
    track: Track = Track.LISTED,
    stream_point: Callable[[str], StreamPoint | None] = lambda _source: None,
) -> Reconciliation:
    """Return the reconciliation of a daemon whose stream from the first source, or else from `host`, is open."""
    metrics, scope = Metrics(), scope_of(store, track)
    gaps = OpenGaps(store, settings.shard, metrics)
    return Reconciliation(
        store, outbound, metrics, gaps, lambda: sources or (host.url,), stream_point, scope, settings, identities
    )


def scope_of(store: Store, track: Track) -> CurrentScope:
    return CurrentScope(store, replace(STORE_ALL, scope=Scope(track=track)))


def ignore_progress(_progress: CrawlProgress) -> None:
    pass


async def behind(sql: asyncpg.Connection) -> dict[str, str]:
    rows = await sql.fetch("select did, latest_unverified_rev from indexer.repo where sync_reason = 'behind'")
    return {row["did"]: row["latest_unverified_rev"] for row in rows}


def status_path(name: str) -> str:
    return f"/xrpc/com.atproto.sync.getRepoStatus?did={did(name)}"


def serve_status(host: ScriptedHost, name: str, *, active: bool) -> None:
    status = {"did": did(name), "active": active} | ({} if active else {"status": "deactivated"})
    host.pages[status_path(name)] = http_response(orjson.dumps(status))
