"""The HTTP side of the daemon: is it alive, is it ready, its metrics, and a page for people."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from html import escape
from typing import Any, Protocol

import orjson
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from indexer import __version__
from indexer.config import Address

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Probe(Protocol):
    """What the running service tells of itself. Each call answers at once, without I/O."""

    def alive(self) -> str | None:
        """None while every stage makes progress or has nothing to do; else the name of the one that stopped."""

    def ready(self) -> str | None:
        """None when caught up, with the database reachable and the stream connected; else why not."""

    def status(self) -> Mapping[str, Any]:
        """What a person wants to see, in the order in which it is shown; values that JSON can hold."""


@asynccontextmanager
async def serve_health(bind: Address, probe: Probe, registry: CollectorRegistry) -> AsyncIterator[Address]:
    """Serves until the block ends; gives the address in use, which has the system's choice for port 0.

    Raises OSError if the address can't be bound.
    """
    runner = web.AppRunner(application(probe, registry), access_log=None, handle_signals=False, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, bind.host, bind.port).start()
        yield Address(bind.host, runner.addresses[0][1])
    finally:
        await runner.cleanup()


def application(probe: Probe, registry: CollectorRegistry) -> web.Application:
    async def healthz(_: web.Request) -> web.Response:
        return _verdict(probe.alive())

    async def readyz(_: web.Request) -> web.Response:
        return _verdict(probe.alive() or probe.ready())

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=encode(registry), headers={hdrs.CONTENT_TYPE: content_type})

    async def health(_: web.Request) -> web.Response:
        return _json({"version": __version__})

    async def page(_: web.Request) -> web.Response:
        reason = probe.alive() or probe.ready()
        return web.Response(text=_page(reason, probe.status()), content_type="text/html")

    routes: dict[str, Handler] = {
        "/": page,
        "/healthz": healthz,
        "/readyz": readyz,
        "/metrics": metrics,
        "/xrpc/_health": health,
    }
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_get(path, handler)
    return app


def _verdict(reason: str | None) -> web.Response:
    return _json({"status": "ok"}) if reason is None else _json({"status": "unavailable", "reason": reason}, 503)


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _page(reason: str | None, status: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(str(name))}<td>{_cell(value)}" for name, value in status.items())
    return _PAGE.format(version=escape(__version__), verdict=escape(reason or "ready"), rows=rows)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"{escape(str(name))}: {escape(str(inner))}" for name, inner in value.items())
    return escape("-" if value is None else f"{value:,}" if isinstance(value, int) else str(value))


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="5">
<title>indexer: {verdict}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 48rem; padding: 0 1rem }}
th {{ text-align: left; vertical-align: top; padding-right: 2rem; font-weight: 600 }}
</style>
<h1>indexer {version}</h1>
<p>{verdict}</p>
<table>{rows}</table>
<p><a href="/metrics">metrics</a> · <a href="/readyz">ready</a> · <a href="/healthz">alive</a></p>
"""
