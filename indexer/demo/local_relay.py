"""A relay of the local network: the events of all PDSes in one sequence, for any number of subscribers."""

import asyncio
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web

from indexer.demo import dag_cbor
from indexer.demo.http_server import HttpServer, XrpcError
from indexer.demo.local_pds import (
    GET_LATEST_COMMIT,
    GET_REPO,
    GET_REPO_STATUS,
    LIST_REPOS,
    LocalPds,
    page_response,
    repo_entry,
)
from indexer.demo.local_plc import LocalPlc
from indexer.demo.local_repo import LocalRepo

LIST_HOSTS = "/xrpc/com.atproto.sync.listHosts"
LIST_REPOS_BY_COLLECTION = "/xrpc/com.atproto.sync.listReposByCollection"
SUBSCRIBE_REPOS = "/xrpc/com.atproto.sync.subscribeRepos"
MAX_BY_COLLECTION = 2_000
"""The highest `limit` for a list by collection."""


def message_frame(kind: str, payload: dict[str, Any]) -> bytes:
    """Return the frame of a message of type `kind` (`#commit`, …)."""
    return dag_cbor.encode({"op": 1, "t": kind}) + dag_cbor.encode(payload)


@dataclass(frozen=True, slots=True)
class SentMessage:
    """An entry of the relay's log.

    Attributes:
        kind: The type (`#commit`, …).
        frame: The whole websocket message.
        payload: The payload without `seq`.
    """

    seq: int
    kind: str
    did: str | None
    frame: bytes
    payload: dict[str, Any] | None


class LocalRelay(HttpServer):
    """A relay.

    A relay that is not serving still receives the events of the PDSes: its subscribers find them after the next start.

    Attributes:
        seq: The latest sequence number; 0 before the first event.
        log: Every message that was sent.
        appended: Set, and replaced, when a message is appended to the log.
    """

    def __init__(self, plc: LocalPlc) -> None:
        super().__init__()
        self.plc = plc
        self.seq = 0
        self.log: list[SentMessage] = []
        self.appended = asyncio.Event()
        self._pdses: list[LocalPds] = []
        for path in (GET_REPO, GET_LATEST_COMMIT, GET_REPO_STATUS):
            self.route(path, self._redirect)
        self.route(LIST_REPOS, self.list_repos)
        self.route(LIST_REPOS_BY_COLLECTION, self.list_repos_by_collection)
        self.route(LIST_HOSTS, self.list_hosts)
        self.route(SUBSCRIBE_REPOS, self.subscribe)

    def follow(self, pds: LocalPds) -> None:
        """Receive the events of a PDS from now on, and list its accounts."""
        self._pdses.append(pds)
        pds.listeners.append(self.receive)

    def receive(self, pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:  # noqa: ARG002 - of a listener
        """Take an event of a PDS, number it and send it."""
        self.seq += 1
        self.append(SentMessage(self.seq, kind, did, message_frame(kind, payload | {"seq": self.seq}), payload))

    def append(self, sent: SentMessage) -> None:
        """Send a message to all subscribers."""
        self.log.append(sent)
        appended, self.appended = self.appended, asyncio.Event()
        appended.set()

    async def subscribe(self, request: web.Request) -> web.StreamResponse:
        """Serve the stream to one subscriber."""
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        sending = asyncio.create_task(self.stream(request, socket))
        try:
            async for _ in socket:  # answers pings and notices the close; other messages are ignored
                pass
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await sending
        return socket

    async def stream(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        """Send all events from the cursor on, or only new ones."""
        cursor = request.query.get("cursor")
        position = len(self.log) if cursor is None else bisect_left(self.log, int(cursor), key=lambda sent: sent.seq)
        while True:
            while position < len(self.log):
                await socket.send_bytes(self.log[position].frame)
                position += 1
            await self.appended.wait()

    async def _redirect(self, request: web.Request) -> web.Response:
        """Redirect a request for an account to its PDS."""
        did = request.query.get("did", "")
        identity = self.plc.identities.get(did)
        if identity is None:
            raise XrpcError("RepoNotFound", f"identity not found: {did}", 404)
        return web.Response(status=302, headers={hdrs.LOCATION: f"{identity.pds}{request.path_qs}"})

    async def list_hosts(self, request: web.Request) -> web.Response:
        """Return a page of the PDSes, with the numbers of their accounts."""
        entries = [
            {
                "hostname": pds.url.partition("://")[2],
                "seq": self.seq,
                "accountCount": len(pds.hosted),
                "status": "active",
            }
            for pds in self._pdses
        ]
        return page_response(request, entries, cursor_on_last_page=False, name="hosts")

    async def list_repos(self, request: web.Request) -> web.Response:
        """Return a page of the active accounts."""
        entries = [repo_entry(repo.did, repo.head.cid, repo.head.rev, None) for repo in self._active_repos()]
        return page_response(request, entries, cursor_on_last_page=False)

    async def list_repos_by_collection(self, request: web.Request) -> web.Response:
        """Return a page of the active accounts that have a record of a collection."""
        prefix = f"{request.query.get('collection', '')}/"
        repos = [repo for repo in self._active_repos() if any(path.startswith(prefix) for path in repo.records)]
        return page_response(
            request, [{"did": repo.did} for repo in repos], cursor_on_last_page=False, max_limit=MAX_BY_COLLECTION
        )

    def _active_repos(self) -> list[LocalRepo]:
        return [hosted.repo for pds in self._pdses for hosted in pds.hosted.values() if hosted.status is None]
