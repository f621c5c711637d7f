"""A relay of the local network: the events of all PDSes in one sequence, for any number of subscribers."""

import asyncio
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import hdrs, web

from indexer.atproto import cid
from indexer.atproto.car import split_car
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.demo import dag_cbor
from indexer.demo.http_server import HttpServer, XrpcError, json_response
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

LIST_REPOS_BY_COLLECTION = "/xrpc/com.atproto.sync.listReposByCollection"
SUBSCRIBE_REPOS = "/xrpc/com.atproto.sync.subscribeRepos"

_STATUS_ERRORS = {
    "deactivated": "RepoDeactivated",
    "takendown": "RepoTakendown",
    "suspended": "RepoTakendown",
    "deleted": "RepoDeleted",
}


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


@dataclass
class ListedAccount:
    """The state of an account as its events show it to the relay: `head` is the CID of the latest commit."""

    head: bytes | None = None
    rev: str | None = None
    status: str | None = None
    collections: set[str] = field(default_factory=set)

    def entry(self, did: str) -> dict[str, Any] | None:
        """Return the entry of `listRepos`; None for an inactive account, which the relay does not list."""
        if self.head is None or self.rev is None or self.status is not None:
            return None
        return repo_entry(did, self.head, self.rev, None)


class LocalRelay(HttpServer):
    """A relay.

    A relay that is not serving still receives the events of the PDSes: its subscribers find them after the next start.

    Attributes:
        seq: The latest sequence number; at first the number before the first event.
        log: Every message that was sent.
        listed: The accounts by DID.
        appended: Set, and replaced, when a message is appended to the log.
    """

    def __init__(self, plc: LocalPlc, first_seq: int = 0) -> None:
        super().__init__()
        self.seq = first_seq
        self.log: list[SentMessage] = []
        self._plc = plc
        self.listed: dict[str, ListedAccount] = {}
        self.appended = asyncio.Event()
        self.route(GET_REPO, self._get_repo)
        self.route(GET_LATEST_COMMIT, self._get_latest_commit)
        self.route(GET_REPO_STATUS, self._get_repo_status)
        self.route(LIST_REPOS, self._list_repos)
        self.route(LIST_REPOS_BY_COLLECTION, self._list_repos_by_collection)

    def receive(self, pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:
        """Take an event of a PDS, number it and send it. Ignore it if the PDS does not host the account."""
        identity = self._plc.identities.get(did)
        if identity is None or identity.pds != pds.url:
            return
        self.seq += 1
        self.publish(did, kind, payload)

    def publish(self, did: str, kind: str, payload: dict[str, Any]) -> None:
        """Send an event with the newest number, and note what it says about the account."""
        self._update_listing(did, kind, payload)
        self.append(SentMessage(self.seq, kind, did, message_frame(kind, payload | {"seq": self.seq}), payload))

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        application = super().application()
        application.router.add_get(SUBSCRIBE_REPOS, self._subscribe)
        return application

    def append(self, sent: SentMessage) -> None:
        """Send a message to all subscribers."""
        self.log.append(sent)
        appended, self.appended = self.appended, asyncio.Event()
        appended.set()

    def _update_listing(self, did: str, kind: str, payload: dict[str, Any]) -> None:
        listed = self.listed.setdefault(did, ListedAccount())
        match kind:
            case "#commit":
                listed.head, listed.rev = payload["commit"], payload["rev"]
                listed.collections |= {op["path"].partition("/")[0] for op in payload["ops"]}
            case "#sync":
                (listed.head, *_), _ = split_car(payload["blocks"], DEFAULT_LIMITS, max_bytes=len(payload["blocks"]))
                listed.rev = payload["rev"]
            case "#account":
                listed.status = None if payload["active"] else payload["status"]

    async def _subscribe(self, request: web.Request) -> web.StreamResponse:
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

    def _get_repo(self, request: web.Request) -> web.Response:
        did = request.query.get("did", "")
        identity = self._plc.identities.get(did)
        if identity is None:
            raise XrpcError("RepoNotFound", f"identity not found: {did}", 404)
        return web.Response(status=302, headers={hdrs.LOCATION: f"{identity.pds}{request.path_qs}"})

    def _get_latest_commit(self, request: web.Request) -> web.Response:
        did, listed = self._known(request)
        if listed.status is not None:
            error = _STATUS_ERRORS.get(listed.status, "RepoInactive")
            raise XrpcError(error, f"account is {listed.status}: {did}", 403)
        if listed.head is None or listed.rev is None:
            raise XrpcError("RepoNotSynchronized", f"no commit seen: {did}", 404)
        return json_response({"cid": cid.cid_text(listed.head), "rev": listed.rev})

    def _get_repo_status(self, request: web.Request) -> web.Response:
        did, listed = self._known(request)
        state: dict[str, Any] = {"did": did, "active": listed.status is None}
        return json_response(state | ({"status": listed.status} if listed.status else {"rev": listed.rev}))

    def _list_repos(self, request: web.Request) -> web.Response:
        entries = [listed.entry(did) for did, listed in self.listed.items()]
        return page_response(request, entries, cursor_on_last_page=False)

    def _list_repos_by_collection(self, request: web.Request) -> web.Response:
        entries = [{"did": did} for did in self.dids_of(request.query.get("collection", ""))]
        return page_response(request, entries, cursor_on_last_page=False, max_limit=2_000)

    def dids_of(self, collection: str) -> list[str]:
        """Return the accounts that have written a record of a collection."""
        return [did for did, listed in self.listed.items() if collection in listed.collections]

    def _known(self, request: web.Request) -> tuple[str, ListedAccount]:
        did = request.query.get("did", "")
        if did not in self.listed:
            raise XrpcError("RepoNotFound", f"account not found: {did}", 404)
        return did, self.listed[did]
