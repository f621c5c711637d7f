"""A relay of the local network: the events of all PDSes in one sequence, for any number of subscribers."""

import asyncio
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import WSCloseCode, hdrs, web

from indexer.atproto import cid
from indexer.atproto.car import split_car
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.demo import dag_cbor
from indexer.demo.http_server import HttpServer, ServerResponse, XrpcError, json_response
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


def error_frame(error: str, message: str) -> bytes:
    """Return an error frame."""
    return dag_cbor.encode({"op": -1}) + dag_cbor.encode({"error": error, "message": message})


class StreamError(Exception):
    """Raised to end a subscription with an error frame of this name."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True, slots=True)
class SentMessage:
    """An entry of the relay's log.

    Attributes:
        kind: The message type (`#commit`, …), or `injected`.
        did: None for an injected message.
        frame: The whole websocket message; str for a text message.
        payload: The payload without `seq`; None for an injected message.
    """

    seq: int
    kind: str
    did: str | None
    frame: bytes | str
    payload: dict[str, Any] | None = None


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
        seq: The latest sequence number; at first `first_seq`, the number before the first event.
        log: Every message that was sent and not forgotten.
        window: How many of the newest messages are replayed; None: all.
        inclusive: True if a replay begins with the event at the cursor, as the protocol says; False if it begins after
            it, as with most relays.
        announces: True if a subscriber is told that its cursor is in the future (`FutureCursor`) or too old
            (`OutdatedCursor`). False if the stream silently continues live, or begins at the oldest event.
        max_lag: How many messages a live subscriber may be behind.
        dropped: The number of events by DID that `drop` suppressed.
        lagging: DIDs that the lists of repos by collection do not contain yet.
    """

    def __init__(self, plc: LocalPlc, first_seq: int) -> None:
        super().__init__()
        self.seq = first_seq
        self.log: list[SentMessage] = []
        self.window: int | None = None
        self.inclusive = True
        self.announces = True
        self.max_lag = 16_384
        self.dropped: Counter[str] = Counter()
        self.lagging: set[str] = set()
        self._plc = plc
        self._first_seq = first_seq
        self._forgotten = 0
        self._to_drop: Counter[str] = Counter()
        self._listed: dict[str, ListedAccount] = {}
        self._streams: set[asyncio.Transport] = set()
        self._appended = asyncio.Event()
        self.route(GET_REPO, self._get_repo)
        self.route(GET_LATEST_COMMIT, self._get_latest_commit)
        self.route(GET_REPO_STATUS, self._get_repo_status)
        self.route(LIST_REPOS, self._list_repos)
        self.route(LIST_REPOS_BY_COLLECTION, self._list_repos_by_collection)

    @property
    def subscribers(self) -> int:
        """The number of connected subscribers."""
        return len(self._streams)

    def receive(self, pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:
        """Take an event of a PDS, number it and send it. Ignore it if the PDS does not host the account."""
        identity = self._plc.identities.get(did)
        if identity is None or identity.pds != pds.url:
            return
        self.seq += 1
        if self._to_drop[did]:
            self._to_drop[did] -= 1
            self.dropped[did] += 1
            return
        self._update_listing(did, kind, payload)
        frame = message_frame(kind, payload | {"seq": self.seq})
        self._append(SentMessage(self.seq, kind, did, frame, payload))

    def drop(self, did: str, events: int = 1) -> None:
        """Suppress the next `events` of `did`. Their sequence numbers stay unused."""
        self._to_drop[did] += events

    def inject(self, frame: bytes | str) -> None:
        """Send any message. It takes a position in the sequence, so a replay contains it."""
        self.seq += 1
        self._append(SentMessage(self.seq, "injected", None, frame))

    def repeat(self, events: int = 1) -> None:
        """Send the newest `events` again, with their old sequence numbers."""
        for sent in self.log[-events:]:
            self._append(replace(sent, seq=self.seq))

    def forget_messages(self, keep: int) -> None:
        """Forget all messages but the newest `keep`. A subscriber that has not received the others is too slow."""
        forgotten = max(len(self.log) - keep, 0)
        if forgotten:
            self._first_seq = self.log[forgotten - 1].seq
            self._forgotten += forgotten
            del self.log[:forgotten]

    def forget_account(self, did: str) -> None:
        """Remove an account from the repo list."""
        self._listed.pop(did, None)

    def restart_sequence(self, first_seq: int = 0) -> None:
        """Lose the log, as a relay does that lost its state, and break all connections. The repo list stays.

        `first_seq` is the number before the first event of the new sequence.
        """
        self.log = []
        self._first_seq = self.seq = first_seq
        self.abort_connections()

    def abort_connections(self) -> int:
        """Break all subscriber connections without a close frame; return how many."""
        for transport in self._streams:
            transport.abort()
        return len(self._streams)

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        application = super().application()
        application.router.add_get(SUBSCRIBE_REPOS, self._subscribe)
        return application

    async def stop(self) -> None:
        """Break all connections and stop serving. The log remains for the next start."""
        self.abort_connections()
        await super().stop()

    def _append(self, sent: SentMessage) -> None:
        self.log.append(sent)
        appended, self._appended = self._appended, asyncio.Event()
        appended.set()

    def _update_listing(self, did: str, kind: str, payload: dict[str, Any]) -> None:
        listed = self._listed.setdefault(did, ListedAccount())
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
        transport = request.transport
        if transport is None:  # the client is already gone
            return socket
        self._streams.add(transport)
        sending = asyncio.create_task(self._stream(socket, request.query.get("cursor")))
        try:
            async for _ in socket:  # answers pings and notices the close; other messages are ignored
                pass
        finally:
            self._streams.discard(transport)
            sending.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await sending
        return socket

    async def _stream(self, socket: web.WebSocketResponse, cursor: str | None) -> None:
        try:
            position, outdated = self._start_position(cursor)
            if outdated:
                info = {"name": "OutdatedCursor", "message": "Requested cursor exceeded limit"}
                await socket.send_bytes(message_frame("#info", info))
            await self._send_from(socket, self._forgotten + position, live=cursor is None)
        except StreamError as error:
            await socket.send_bytes(error_frame(error.error, str(error)))
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=error.error.encode())

    def _start_position(self, cursor: str | None) -> tuple[int, bool]:
        """Return the position in the log to begin at, and True if the stream begins with `OutdatedCursor`."""
        if cursor is None:
            return len(self.log), False
        try:
            seq = int(cursor)
        except ValueError:
            raise StreamError("InvalidRequest", "cursor must be an integer") from None
        if seq > self.seq:
            if self.announces:
                raise StreamError("FutureCursor", "Cursor in the future.")
            return len(self.log), False
        first = 0 if self.window is None else max(len(self.log) - self.window, 0)
        last_lost = self.log[first - 1].seq if first else self._first_seq
        wanted = bisect_left(self.log, seq if self.inclusive else seq + 1, key=lambda sent: sent.seq)
        return max(first, wanted), self.announces and 0 < seq < last_lost

    async def _send_from(self, socket: web.WebSocketResponse, position: int, *, live: bool) -> None:
        """Send all messages from a position on, which counts the forgotten ones, too."""
        while True:
            while (behind := self._forgotten + len(self.log) - position) > 0:
                if (live and behind > self.max_lag) or behind > len(self.log):
                    raise StreamError("ConsumerTooSlow", f"{behind} events behind")
                frame = self.log[-behind].frame
                await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
                position += 1
            live = True
            await self._appended.wait()

    def _get_repo(self, request: web.Request) -> ServerResponse:
        did = request.query.get("did", "")
        identity = self._plc.identities.get(did)
        if identity is None:
            raise XrpcError("RepoNotFound", f"identity not found: {did}", 404)
        return ServerResponse((b"",), 302, {hdrs.LOCATION: f"{identity.pds}{request.path_qs}"})

    def _get_latest_commit(self, request: web.Request) -> ServerResponse:
        did, listed = self._known(request)
        if listed.status is not None:
            error = _STATUS_ERRORS.get(listed.status, "RepoInactive")
            raise XrpcError(error, f"account is {listed.status}: {did}", 403)
        if listed.head is None or listed.rev is None:
            raise XrpcError("RepoNotSynchronized", f"no commit seen: {did}", 404)
        return json_response({"cid": cid.cid_text(listed.head), "rev": listed.rev})

    def _get_repo_status(self, request: web.Request) -> ServerResponse:
        did, listed = self._known(request)
        state: dict[str, Any] = {"did": did, "active": listed.status is None}
        return json_response(state | ({"status": listed.status} if listed.status else {"rev": listed.rev}))

    def _list_repos(self, request: web.Request) -> ServerResponse:
        entries = [listed.entry(did) for did, listed in self._listed.items()]
        return page_response(request, entries, cursor_on_last_page=False)

    def _list_repos_by_collection(self, request: web.Request) -> ServerResponse:
        collection = request.query.get("collection", "")
        entries = [
            {"did": did}
            for did, listed in self._listed.items()
            if collection in listed.collections and did not in self.lagging
        ]
        return page_response(request, entries, cursor_on_last_page=False, max_limit=2_000)

    def _known(self, request: web.Request) -> tuple[str, ListedAccount]:
        did = request.query.get("did", "")
        if did not in self._listed:
            raise XrpcError("RepoNotFound", f"account not found: {did}", 404)
        return did, self._listed[did]
