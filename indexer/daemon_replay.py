"""Build the replay of dead letters, with the same rules as a daemon."""

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import time

from indexer.clients import make_did_resolver, open_outbound_client, stored_policy
from indexer.daemon import KEY_LOOKUP_TIMEOUT_SECONDS
from indexer.identity import IdentityCache, IdentityLifetimes
from indexer.monitoring.metrics import Metrics
from indexer.service.live.dead_letter_replay import DeadLetterReplay
from indexer.settings import Settings
from indexer.store import Store


@asynccontextmanager
async def open_replay(settings: Settings, store: Store) -> AsyncIterator[DeadLetterReplay]:
    """Build the replay of dead letters, with the same rules as a daemon with these settings.

    Only the operator causes lookups here, so identities are refreshed without a limit, and missing keys are looked up
    again.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        outbound = await stack.enter_async_context(open_outbound_client(settings, metrics.outbound_request))
        outbound.hosts.restore(await store.load_hosts())
        resolver, lifetimes = make_did_resolver(settings, outbound), IdentityLifetimes(missing_max_age=0.0)
        identities = IdentityCache(resolver, store, metrics, clock=time, refresh_rate=math.inf, lifetimes=lifetimes)
        stack.push_async_callback(identities.close)
        yield DeadLetterReplay(
            store,
            identities,
            await stored_policy(settings, store),
            upstream_is_pds=settings.upstream == "pds",
            key_timeout=KEY_LOOKUP_TIMEOUT_SECONDS,
        )
        await store.save_hosts(outbound.hosts.unsaved())
