"""The path `/subscribe`, as Jetstream serves it."""

from collections.abc import Sequence
from functools import partial

import structlog
from aiohttp import web

from indexer.monitoring.connection_limit import WEBSOCKETS
from indexer.monitoring.metrics import Metrics
from indexer.service.feed.frame_writer import FrameWriter
from indexer.service.feed.jetstream_options import BadOptionsError, parse_query
from indexer.service.feed.jetstream_pages import ReplayPages
from indexer.service.feed.jetstream_reader import JetstreamReader
from indexer.service.feed.jetstream_subscriber import CLOSE_SECONDS, Subscriber
from indexer.store import Store

MAX_MESSAGE_BYTES = 1 << 20
"""Maximum size of a message of a subscriber. 10,000 DIDs of did:plc have 350 kB."""

log = structlog.get_logger(__name__)


class JetstreamRoutes:
    """Serves subscribers."""

    def __init__(self, store: Store, reader: JetstreamReader, metrics: Metrics, *, values_stored: bool) -> None:
        self._reader = reader
        self._pages = ReplayPages(store)
        self._metrics = metrics
        self._values_stored = values_stored

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
            compress=False, max_msg_size=MAX_MESSAGE_BYTES, timeout=CLOSE_SECONDS, autoping=False
        )
        if not websocket.can_prepare(request):
            return _refusal(400, "connect with a websocket client: ws://HOST:PORT/subscribe")
        with request.app[WEBSOCKETS].hold(request, websocket, for_anyone=True), self._reader.subscriber():
            await websocket.prepare(request)
            if (transport := request.transport) is None:
                return websocket
            writer = FrameWriter(transport)
            subscriber = Subscriber(websocket, writer, options, partial(self._metrics.feed_events, "jetstream"))
            try:
                ending = await subscriber.serve(self._reader.window, self._pages)
            finally:
                await writer.close()
            self._metrics.feed_disconnected("jetstream", ending.cause if ending else "client")
            if ending is not None:
                log.warning("jetstream.disconnected", client=request.remote, reason=ending.reason)
        return websocket


def _refusal(status: int, message: str) -> web.Response:
    return web.Response(text=f"{message}\n", status=status)
