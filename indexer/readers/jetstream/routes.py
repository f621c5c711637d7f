"""The path `/subscribe`, as Jetstream serves it."""

import asyncio
from collections.abc import Sequence

import structlog
from aiohttp import web

from indexer.concurrency.turns import Turns
from indexer.db import Database
from indexer.net.server.connection_limit import WEBSOCKETS, client_network
from indexer.readers.frame_writer import FrameWriter
from indexer.readers.jetstream.options import BadOptionsError, SubscriberOptions, parse_query
from indexer.readers.jetstream.pages import ReplayPages
from indexer.readers.jetstream.reader import JetstreamReader
from indexer.readers.jetstream.subscriber import CLOSE_SECONDS, Subscriber
from indexer.readers.limited_reading import PIECE_BYTES, LimitedReading, reading_seconds
from indexer.readers.log_rate import LogRate
from indexer.telemetry.metrics import Metrics

MAX_MESSAGE_BYTES = 1 << 20
"""Maximum size of a message of a subscriber. 10,000 DIDs of did:plc have 350 kB."""

log = structlog.get_logger(__name__)


class JetstreamRoutes:
    """Serves subscribers."""

    def __init__(self, db: Database, reader: JetstreamReader, metrics: Metrics, *, values_stored: bool) -> None:
        self._reader = reader
        self._pages = ReplayPages(db)
        self._metrics = metrics
        self._values_stored = values_stored
        self._reading_turns = Turns()
        self._log_rate = LogRate()

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes. Like Jetstream's, they need no password: they only send public records."""
        return [web.get("/subscribe", self._subscribe)]

    async def _subscribe(self, request: web.Request) -> web.StreamResponse:
        if not self._values_stored:
            return _refusal(501, "events have the values of records, which are not stored: INDEXER_STORE_VALUES is off")
        try:
            options = parse_query(request.query_string, request.headers.get("Socket-Encoding", ""))
        except BadOptionsError as error:
            return _refusal(400, str(error))
        # Events are sent as complete frames, so the connection must not have a compression of its own.
        websocket = web.WebSocketResponse(
            compress=False, max_msg_size=MAX_MESSAGE_BYTES, timeout=CLOSE_SECONDS, autoping=False, decode_text=False
        )
        if not websocket.can_prepare(request):
            return _refusal(400, "connect with a websocket client: ws://HOST:PORT/subscribe")
        try:
            with request.app[WEBSOCKETS].hold(request, websocket, for_anyone=True) as held, self._reader.subscriber():
                await self._serve(request, websocket, options, held.displaced)
        except web.HTTPServiceUnavailable:
            self._metrics.feed_disconnections["jetstream", "refused"].inc()
            raise
        return websocket

    async def _serve(
        self,
        request: web.Request,
        websocket: web.WebSocketResponse,
        options: SubscriberOptions,
        displaced: asyncio.Event,
    ) -> None:
        network = client_network(request)
        # The library parses bytes that follow the handshake before they can be counted. So a connection is a piece.
        await self._reading_turns.spend(network, reading_seconds(PIECE_BYTES))
        await websocket.prepare(request)
        if (transport := request.transport) is None:
            return
        writer = FrameWriter(transport)
        LimitedReading(transport, self._reading_turns, network)
        subscriber = Subscriber(websocket, writer, options, network, self._metrics.feed_events["jetstream"].inc)
        try:
            ending = await subscriber.serve(self._reader.window, self._pages, displaced)
        finally:
            await writer.close()
        self._metrics.feed_disconnections["jetstream", ending.cause if ending else "client"].inc()
        if ending is not None and self._log_rate.allows_line():
            log.warning("jetstream.disconnected", client=network, reason=ending.reason)


def _refusal(status: int, message: str) -> web.Response:
    return web.Response(text=f"{message}\n", status=status)
