"""An HTTP server, usually on loopback."""

import json
from collections.abc import Awaitable, Callable

from aiohttp import web

LOOPBACK = "127.0.0.1"


class XrpcError(web.HTTPBadRequest):
    """Raised by a handler to end the request with an XRPC error."""

    def __init__(self, error: str, message: str, status: int = 400) -> None:
        super().__init__(text=json.dumps({"error": error, "message": message}), content_type="application/json")
        self.set_status(status)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves handlers. If no port is set, the system chooses one at the first start; later starts use the same port.

    Attributes:
        host: The name or address that the server listens on and that its URL contains.
        port: The port; 0 until it is set or chosen.
    """

    def __init__(self) -> None:
        self.host = LOOPBACK
        self.port = 0
        self._handlers: dict[tuple[str, str], Handler] = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The base URL of the server, which has one after its first start."""
        return f"http://{self.host}:{self.port}"

    def route(self, path: str, handler: Handler, method: str = "GET") -> None:
        """Let `handler` respond to requests for `path`. Call it before `start`."""
        self._handlers[method, path] = handler

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        application = web.Application()
        for (method, path), handler in self._handlers.items():
            application.router.add_route(method, path, handler)
        return application

    async def start(self) -> None:
        """Start serving."""
        # Cancel the handler of a request whose client disconnected: one that hangs would never end.
        self._runner = web.AppRunner(
            self.application(), access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections and stop serving; do nothing if the server is not running."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
