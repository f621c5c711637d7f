"""The feeds of the daemon: build the parts of the role `feed` from the settings."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from aiohttp import web

from indexer.app.clients import open_webhook_client
from indexer.app.settings import Settings
from indexer.app.tuning import Tuning
from indexer.db import Database
from indexer.net.http import OutboundClient
from indexer.net.identity import IdentityCache
from indexer.readers.access import Access
from indexer.readers.jetstream.reader import JetstreamReader
from indexer.readers.jetstream.routes import JetstreamRoutes
from indexer.readers.tap.channel import Channel, refuse_channel
from indexer.readers.tap.feed import TapFeed
from indexer.readers.tap.routes import TapRoutes
from indexer.readers.tap.set_aside import RefusalLimits
from indexer.readers.tap.webhook import Webhook
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics


@asynccontextmanager
async def open_webhook(settings: Settings, metrics: Metrics, tuning: Tuning) -> AsyncIterator[OutboundClient | None]:
    """Open the client for the webhook; yield None if the settings name no webhook."""
    if settings.webhook_url is None:
        yield None
        return
    url, on_request = settings.webhook_url.get_secret_value(), metrics.outbound_request
    async with open_webhook_client(settings, url, on_request, tuning.timeouts, tuning.host_pauses) as client:
        yield client


class DaemonFeeds:
    """The feeds of one process.

    Attributes:
        tap_feed: Delivers changes to the channel or to the webhook.
        channel: Serves the websocket of tap.
        webhook: Sends the events to a URL; None if the settings name none.
        jetstream_reader: Reads changes for all Jetstream clients.
    """

    def __init__(
        self,
        settings: Settings,
        db: Database,
        identities: IdentityCache,
        metrics: Metrics,
        conditions: Conditions,
        webhook: OutboundClient | None,
    ) -> None:
        """Build the feeds. `webhook` is the client for the webhook; None if the settings name none."""
        url, secret = settings.webhook_url, settings.admin_password
        password = secret.get_secret_value() if secret else None
        self._access = Access(password)
        self._tap_routes = TapRoutes(db, identities)
        self.tap_feed = TapFeed(
            db,
            conditions,
            metrics,
            RefusalLimits.below(settings.consumer_lag_limit),
            one_per_repo=webhook is not None,
        )
        self.channel = Channel(self.tap_feed, metrics)
        self.webhook: Webhook | None = None
        if webhook is not None and url is not None:
            self.webhook = Webhook(self.tap_feed, webhook, url.get_secret_value(), password, conditions, metrics)
        self.jetstream_reader = JetstreamReader(db)
        self._jetstream_routes = JetstreamRoutes(
            db, self.jetstream_reader, metrics, values_stored=settings.store_values
        )

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield the routes of tap and of Jetstream. Changes and acknowledgements need the password, if there is one."""
        yield from self._tap_routes.routes(self._access)
        channel = self.channel.connect if self.webhook is None else refuse_channel
        yield web.get("/channel", self._access.guard(channel))
        yield from self._jetstream_routes.routes()

    def clients(self) -> dict[tuple[str, ...], float]:
        """Return the number of clients by the name of the feed."""
        return {
            ("tap",): 0 if self.webhook is not None else self.tap_feed.clients,
            ("jetstream",): self.jetstream_reader.subscribers,
            ("webhook",): float(self.webhook is not None),
        }
