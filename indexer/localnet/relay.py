"""A relay: the events of all hosts in one sequence, for any number of subscribers."""

import asyncio
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientConnectionResetError, WSCloseCode, hdrs, web

from indexer.atproto import cid
from indexer.atproto.car import split_car
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet import dag_cbor
from indexer.localnet.pds import (
    GET_LATEST_COMMIT,
    GET_REPO,
    GET_REPO_STATUS,
    LIST_REPOS,
    Pds,
    page_answer,
    repo_row,
)
from indexer.localnet.plc import Plc
from indexer.localnet.server import Answer, Refused, Server, json_answer

_STATUS_ERRORS = {
    "deactivated": "RepoDeactivated",
    "takendown": "RepoTakendown",
    "suspended": "RepoTakendown",
    "deleted": "RepoDeleted",
}

LIST_REPOS_BY_COLLECTION = "/xrpc/com.atproto.sync.listReposByCollection"
SUBSCRIBE_REPOS = "/xrpc/com.atproto.sync.subscribeRepos"


def message_frame(kind: str, payload: dict[str, Any]) -> bytes:
    """A message of type `kind` (`#commit` …)."""
    return dag_cbor.encode({"op": 1, "t": kind}) + dag_cbor.encode(payload)


def error_frame(error: str, message: str) -> bytes:
    return dag_cbor.encode({"op": -1}) + dag_cbor.encode({"error": error, "message": message})


class StreamEnd(Exception):  # noqa: N818  a message to the subscriber, not a failure of the relay
    """Ends a subscription with an error frame."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Sent:
    """An entry of the relay's log; `frame` is the whole websocket message, a str for a text message."""

    seq: int
    kind: str
    did: str | None
    frame: bytes | str


@dataclass
class Listed:
    """What the relay knows of an account from its events; `status` None is active, `collections` are those that it has,
    or had.
    """

    head: bytes | None = None
    rev: str | None = None
    status: str | None = None
    collections: set[str] = field(default_factory=set)

    def row(self, did: str) -> dict[str, Any] | None:
        """The entry of `listRepos`, which has active repos only."""
        if self.head is None or self.rev is None or self.status is not None:
            return None
        return repo_row(did, self.head, self.rev, None)


class Relay(Server):
    """Re-sequences what it is told by `receive`; `log` keeps every message that was ever sent.

    `window` is how many of the newest events are replayed (None: all). `inclusive` says whether a replay
    begins with the cursor's own event, as the specification has it, or behind it, as most relays do.
    `most_behind` is how many events a live subscriber may lag behind. `dropped` and `refused` count events
    that were not passed on: lost on purpose, and from a host that isn't the account's.
    """

    def __init__(
        self, plc: Plc, *, window: int | None = None, inclusive: bool = True, most_behind: int = 16_384
    ) -> None:
        super().__init__()
        self.seq = 0
        self.log: list[Sent] = []
        self.window = window
        self.inclusive = inclusive
        self.most_behind = most_behind
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._plc = plc
        self._to_drop: Counter[str] = Counter()
        self._listed: dict[str, Listed] = {}
        self._streams: set[asyncio.Transport] = set()
        self._grown = asyncio.Event()
        self.route(GET_REPO, self._get_repo)
        self.route(GET_LATEST_COMMIT, self._get_latest_commit)
        self.route(GET_REPO_STATUS, self._get_repo_status)
        self.route(LIST_REPOS, self._list_repos)
        self.route(LIST_REPOS_BY_COLLECTION, self._list_repos_by_collection)

    @property
    def subscribers(self) -> int:
        return len(self._streams)

    def receive(self, pds: Pds, did: str, kind: str, payload: dict[str, Any]) -> None:
        """Takes an event of a host. Only the host that the account's identity names is heard."""
        identity = self._plc.identities.get(did)
        if identity is None or identity.pds != pds.url:
            self.refused[did] += 1
            return
        self.seq += 1
        if self._to_drop[did]:
            self._to_drop[did] -= 1
            self.dropped[did] += 1
            return
        self._note(did, kind, payload)
        self._append(Sent(self.seq, kind, did, message_frame(kind, payload | {"seq": self.seq})))

    def drop(self, did: str, events: int = 1) -> None:
        """Loses the next `events` of `did`: their sequence numbers stay unused."""
        self._to_drop[did] += events

    def inject(self, frame: bytes | str) -> None:
        """Sends any message at all; it takes a place in the sequence, so a replay meets it again."""
        self.seq += 1
        self._append(Sent(self.seq, "injected", None, frame))

    def repeat(self, events: int = 1) -> None:
        """Sends the newest `events` once more, with the numbers that they had."""
        for sent in self.log[-events:]:
            self._append(Sent(self.seq, sent.kind, sent.did, sent.frame))

    def cut(self) -> int:
        """Breaks every stream without a word, and says how many."""
        for transport in self._streams:
            transport.abort()
        return len(self._streams)

    def application(self) -> web.Application:
        application = super().application()
        application.router.add_get(SUBSCRIBE_REPOS, self._subscribe)
        return application

    async def stop(self) -> None:
        self.cut()
        await super().stop()

    def _append(self, sent: Sent) -> None:
        self.log.append(sent)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def _note(self, did: str, kind: str, payload: dict[str, Any]) -> None:
        listed = self._listed.setdefault(did, Listed())
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
        if transport is None:  # already gone
            return socket
        self._streams.add(transport)
        sending = asyncio.create_task(self._stream(socket, request.query.get("cursor")))
        try:
            async for _ in socket:  # answers pings and sees the close; whatever else a client says is ignored
                pass
        finally:
            self._streams.discard(transport)
            sending.cancel()
            with suppress(asyncio.CancelledError, ClientConnectionResetError):
                await sending
        return socket

    async def _stream(self, socket: web.WebSocketResponse, cursor: str | None) -> None:
        try:
            place, outdated = self._begin(cursor)
            if outdated:
                info = {"name": "OutdatedCursor", "message": "Requested cursor exceeded limit"}
                await socket.send_bytes(message_frame("#info", info))
            await self._send_from(socket, place, live=cursor is None)
        except StreamEnd as end:
            await socket.send_bytes(error_frame(end.error, str(end)))
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=end.error.encode())

    def _begin(self, cursor: str | None) -> tuple[int, bool]:
        """Where in the log to begin, and whether events after its cursor are out of the window."""
        if cursor is None:
            return len(self.log), False
        try:
            seq = int(cursor)
        except ValueError:
            raise StreamEnd("InvalidRequest", "cursor must be an integer") from None
        if seq > self.seq:
            raise StreamEnd("FutureCursor", "Cursor in the future.")
        first = 0 if self.window is None else max(len(self.log) - self.window, 0)
        lost = self.log[first - 1].seq if first else 0
        wanted = bisect_left(self.log, seq if self.inclusive else seq + 1, key=lambda sent: sent.seq)
        return max(first, wanted), 0 < seq < lost

    async def _send_from(self, socket: web.WebSocketResponse, place: int, *, live: bool) -> None:
        while True:
            while place < len(self.log):
                if live and len(self.log) - place > self.most_behind:
                    raise StreamEnd("ConsumerTooSlow", f"more than {self.most_behind} events behind")
                frame = self.log[place].frame
                await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
                place += 1
            live = True
            await self._grown.wait()

    def _get_repo(self, request: web.Request) -> Answer:
        did = request.query.get("did", "")
        identity = self._plc.identities.get(did)
        if identity is None:
            raise Refused("RepoNotFound", f"identity not found: {did}", 404)
        return Answer((b"",), 302, {hdrs.LOCATION: f"{identity.pds}{request.path_qs}"})

    def _get_latest_commit(self, request: web.Request) -> Answer:
        did, listed = self._known(request)
        if listed.status is not None:
            error = _STATUS_ERRORS.get(listed.status, "RepoInactive")
            raise Refused(error, f"account is {listed.status}: {did}", 403)
        if listed.head is None or listed.rev is None:
            raise Refused("RepoNotSynchronized", f"no commit seen: {did}", 404)
        return json_answer({"cid": cid.cid_text(listed.head), "rev": listed.rev})

    def _get_repo_status(self, request: web.Request) -> Answer:
        did, listed = self._known(request)
        state: dict[str, Any] = {"did": did, "active": listed.status is None}
        return json_answer(state | ({"status": listed.status} if listed.status else {"rev": listed.rev}))

    def _list_repos(self, request: web.Request) -> Answer:
        rows = [listed.row(did) for did, listed in self._listed.items()]
        return page_answer(request, rows, cursor_on_last_page=False)

    def _list_repos_by_collection(self, request: web.Request) -> Answer:
        collection = request.query.get("collection", "")
        rows = [{"did": did} for did, listed in self._listed.items() if collection in listed.collections]
        return page_answer(request, rows, cursor_on_last_page=False, most=2_000)

    def _known(self, request: web.Request) -> tuple[str, Listed]:
        did = request.query.get("did", "")
        if did not in self._listed:
            raise Refused("RepoNotFound", f"account not found: {did}", 404)
        return did, self._listed[did]
