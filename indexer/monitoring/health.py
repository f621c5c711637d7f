"""The HTTP server of the daemon: health checks, metrics, and a status page for people."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from html import escape
from typing import Any, Protocol

import orjson
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from indexer import __version__
from indexer.settings import Address

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Probe(Protocol):
    """The state of the running daemon. Every method returns immediately, without I/O."""

    def alive(self) -> str | None:
        """Return None while every stage makes progress or is idle, else a message that names the stalled stage."""

    def ready(self) -> str | None:
        """Return None if the database answers, the stream is open and the lag is small, else the reason."""

    def status(self) -> Mapping[str, Any]:
        """Return the rows of the status page in their order. JSON can represent the values."""


@asynccontextmanager
async def serve_health(bind: Address, probe: Probe, registry: CollectorRegistry) -> AsyncIterator[Address]:
    """Run the HTTP server until the block ends; yield its address, with the real port if `bind` has port 0.

    Raises:
        OSError: The address cannot be bound.
    """
    app = make_application(probe, registry)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, bind.host, bind.port).start()
        yield Address(bind.host, runner.addresses[0][1])
    finally:
        await runner.cleanup()


def make_application(probe: Probe, registry: CollectorRegistry) -> web.Application:
    """Return the web application with all routes."""

    async def healthz(_: web.Request) -> web.Response:
        return _check_response(probe.alive())

    async def readyz(_: web.Request) -> web.Response:
        return _check_response(probe.alive() or probe.ready())

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=encode(registry), headers={hdrs.CONTENT_TYPE: content_type})

    async def version(_: web.Request) -> web.Response:
        return _json_response({"version": __version__})

    async def status_page(_: web.Request) -> web.Response:
        reason = probe.alive() or probe.ready()
        return web.Response(text=_render_page(reason, probe.status()), content_type="text/html")

    routes: dict[str, Handler] = {
        "/": status_page,
        "/healthz": healthz,
        "/readyz": readyz,
        "/metrics": metrics,
        "/xrpc/_health": version,
    }
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_get(path, handler)
    return app


def _check_response(reason: str | None) -> web.Response:
    if reason is None:
        return _json_response({"status": "ok"})
    return _json_response({"status": "unavailable", "reason": reason}, 503)


def _json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _render_page(reason: str | None, status: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(str(name))}<td>{_cell(value)}" for name, value in status.items())
    return _PAGE.format(version=escape(__version__), readiness=escape(reason or "ready"), rows=rows)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"{escape(str(name))}: {escape(str(inner))}" for name, inner in value.items())
    return escape("-" if value is None else f"{value:,}" if isinstance(value, int) else str(value))


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="5">
<title>indexer: {readiness}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 48rem; padding: 0 1rem }}
th {{ text-align: left; vertical-align: top; padding-right: 2rem; font-weight: 600 }}
</style>
<h1>indexer {version}</h1>
<p>{readiness}</p>
<table>{rows}</table>
<p><a href="/metrics">metrics</a> · <a href="/readyz">readiness check</a> · <a href="/healthz">health check</a></p>
"""
