"""Build the replay of dead letters, with the same rules as a daemon."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from indexer.app.clients import open_identities, open_outbound_client, stored_policy
from indexer.app.settings import Settings
from indexer.app.tuning import Tuning
from indexer.db import Database
from indexer.live.dead_letter_replay import DeadLetterReplay
from indexer.telemetry.metrics import Metrics


@asynccontextmanager
async def open_replay(settings: Settings, db: Database) -> AsyncIterator[DeadLetterReplay]:
    """Build the replay of dead letters, with the same rules as a daemon with these settings."""
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        outbound = await stack.enter_async_context(open_outbound_client(settings, metrics.outbound_request))
        outbound.hosts.restore(await db.hosts.load())
        identities = await stack.enter_async_context(open_identities(settings, db, outbound, metrics))
        yield DeadLetterReplay(
            db,
            identities,
            await stored_policy(settings, db),
            upstream_is_pds=settings.upstream == "pds",
            key_timeout=Tuning().key_lookup_timeout,
        )
        await db.hosts.save(outbound.hosts.unsaved())
