"""The local network of `indexer.demo`, with faults of its servers, and with attacks and failures of its relay."""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from aiohttp import WSCloseCode, hdrs, web
from aiohttp.typedefs import Handler

from indexer.atproto import cid
from indexer.atproto.car import split_car
from indexer.atproto.crypto import Curve
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.demo import dag_cbor
from indexer.demo.http_server import HttpServer, XrpcError
from indexer.demo.local_account import LocalAccount
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_pds import (
    GET_LATEST_COMMIT,
    GET_REPO_STATUS,
    HostedRepo,
    LocalPds,
    page_response,
    repo_entry,
)
from indexer.demo.local_plc import LocalPlc
from indexer.demo.local_relay import MAX_BY_COLLECTION, SUBSCRIBE_REPOS, LocalRelay, SentMessage, message_frame

CHUNK_BYTES = 1 << 16
SLOW_WRITES_PER_SECOND = 20
ACCEPT_CYCLES = 10
"""Cycles of the event loop in which an accepted connection becomes known to the server."""
RELAY_SEQ_DISTANCE = 1_000
"""The sequence of relay number n begins after n times this number."""


@dataclass
class Fault:
    """One fault, and the requests that it applies to.

    Attributes:
        path: The fault applies to requests whose path ends like this.
        did: If given, the fault applies only to requests with this `did` parameter.
        times: How many requests the fault applies to; None: no limit.
        status: Send this status, with `headers` and `body`, instead of the real response.
        hang: Never respond.
        cut: Break the connection after this many bytes of the body.
        sections: End the body, a CAR, cleanly after this many of its parts: its header, then its sections.
        rate: Send this many bytes per second.
        longer_than: The fault applies to requests whose path and query have more characters.
        fired: How many requests the fault was applied to.
    """

    path: str
    did: str | None = None
    times: int | None = 1
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang: bool = False
    cut: int | None = None
    sections: int | None = None
    rate: int | None = None
    longer_than: int = 0
    fired: int = 0

    def matches(self, request: web.Request) -> bool:
        """Return True if the fault applies to this request."""
        return (
            request.path.endswith(self.path)
            and self.did in (None, request.query.get("did"))
            and len(request.path_qs) > self.longer_than
            and (self.times is None or self.fired < self.times)
        )


class FaultyServer(HttpServer):
    """A server that injects faults into its responses.

    Attributes:
        requests: The number of requests by path.
        sent: The bytes of the bodies by path, without compression and faults.
        faults: Faults to inject. The first one that matches a request is applied.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.faults: list[Fault] = []

    async def stop(self) -> None:
        if self._runner is not None:
            # Python 3.11 leaves a connection open that is accepted while its server closes. So accept nothing more, and
            # wait until the connections that were accepted are known.
            loop = asyncio.get_running_loop()
            for site in self._runner.sites:
                server = site._server  # noqa: SLF001 - aiohttp does not show the sockets
                for listening in server.sockets if isinstance(server, asyncio.Server) else ():
                    loop.remove_reader(listening.fileno())
            for _ in range(ACCEPT_CYCLES):
                await asyncio.sleep(0)
        await super().stop()

    def application(self) -> web.Application:
        application = super().application()
        application.middlewares.append(self._respond)
        return application

    @web.middleware
    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == SUBSCRIBE_REPOS:
            return await handler(request)
        self.requests[request.path] += 1
        await request.read()  # a client sees the response to its whole request
        fault = next((fault for fault in self.faults if fault.matches(request)), None)
        if fault is not None:
            fault.fired += 1
            if fault.hang:
                await asyncio.get_running_loop().create_future()  # cancelled at disconnection or when the server stops
            if fault.status is not None:
                return web.Response(status=fault.status, headers=fault.headers, body=fault.body)
        response = await handler(request)
        if isinstance(response, web.WebSocketResponse):
            return response
        assert isinstance(response, web.Response)
        self.sent[request.path] += len(response.body) if isinstance(response.body, bytes) else 0
        # No compression for a slow response: the encoder would hold everything back until the end.
        slow = fault is not None and fault.rate is not None
        if response.body and "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "") and not slow:
            response.enable_compression(web.ContentCoding.gzip)
        return response if fault is None else await self._send_faulty(request, response, fault)

    @staticmethod
    async def _send_faulty(request: web.Request, response: web.Response, fault: Fault) -> web.StreamResponse:
        body = response.body
        assert isinstance(body, bytes)
        if fault.sections is not None:
            body = b"".join(list(car_parts(body))[: fault.sections])
        body = body[: fault.cut]
        faulty = web.StreamResponse(status=response.status, headers={hdrs.CONTENT_TYPE: response.content_type})
        if response.compression:
            faulty.enable_compression(web.ContentCoding.gzip)
        await faulty.prepare(request)
        step = max(fault.rate // SLOW_WRITES_PER_SECOND, 1) if fault.rate else CHUNK_BYTES
        for start in range(0, len(body), step):
            await faulty.write(body[start : start + step])
            if fault.rate:
                await asyncio.sleep(step / fault.rate)
        if fault.cut is not None and request.transport is not None:
            request.transport.close()
        return faulty


def car_parts(car: bytes) -> Iterator[bytes]:
    """Yield the header of a CAR, then its sections."""
    start = 0
    while start < len(car):
        size, shift, end = 0, 0, start
        while car[end] & 0x80:
            size |= (car[end] & 0x7F) << shift
            shift, end = shift + 7, end + 1
        end += 1 + (size | car[end] << shift)
        yield car[start:end]
        start = end


def error_frame(error: str, message: str) -> bytes:
    """Return an error frame."""
    return dag_cbor.encode({"op": -1}) + dag_cbor.encode({"error": error, "message": message})


class StreamError(Exception):
    """Raised to end a subscription with an error frame of this name."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


STATUS_ERRORS = {
    "deactivated": "RepoDeactivated",
    "takendown": "RepoTakendown",
    "suspended": "RepoTakendown",
    "deleted": "RepoDeleted",
}


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


class FaultyPlc(FaultyServer, LocalPlc):
    """A directory."""


class FaultyPds(FaultyServer, LocalPds):
    """A PDS."""


class FaultyRelay(FaultyServer, LocalRelay):
    """A relay.

    Attributes:
        window: How many of the newest messages are replayed; None: all.
        inclusive: True if a replay begins with the event at the cursor, as the protocol says; False if it begins after
            it, as with most relays.
        announces: True if a subscriber is told that its cursor is in the future (`FutureCursor`) or too old
            (`OutdatedCursor`). False if the stream silently continues live, or begins at the oldest event.
        max_lag: How many messages a live subscriber may be behind.
        dropped: The number of events by DID that `drop` suppressed.
        listed: The accounts as their events show them, by DID.
        lagging: DIDs that the lists of repos by collection do not contain yet.
    """

    def __init__(self, plc: LocalPlc, first_seq: int = 0) -> None:
        super().__init__(plc)
        self.seq = first_seq
        self.window: int | None = None
        self.inclusive = True
        self.announces = True
        self.max_lag = 16_384
        self.dropped: Counter[str] = Counter()
        self.lagging: set[str] = set()
        self._first_seq = first_seq
        self._forgotten = 0
        self._to_drop: Counter[str] = Counter()
        self._texts: set[bytes] = set()
        self._streams: set[asyncio.Transport] = set()
        self.listed: dict[str, ListedAccount] = {}
        self.route(GET_LATEST_COMMIT, self._get_latest_commit)
        self.route(GET_REPO_STATUS, self._get_repo_status)

    @property
    def subscribers(self) -> int:
        """The number of connected subscribers."""
        return len(self._streams)

    def receive(self, pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:
        """Ignore an event if the PDS does not host the account."""
        identity = self.plc.identities.get(did)
        if identity is None or identity.pds != pds.url:
            return
        if self._to_drop[did]:
            self.seq += 1
            self._to_drop[did] -= 1
            self.dropped[did] += 1
        else:
            self._update_listing(did, kind, payload)
            super().receive(pds, did, kind, payload)

    def drop(self, did: str, events: int = 1) -> None:
        """Suppress the next `events` of `did`. Their sequence numbers stay unused."""
        self._to_drop[did] += events

    def inject(self, frame: bytes | str) -> None:
        """Send any message, str as a text message. It takes a position in the sequence, so a replay contains it."""
        self.seq += 1
        if isinstance(frame, str):
            frame = frame.encode()
            self._texts.add(frame)
        self.append(SentMessage(self.seq, "injected", None, frame, None))

    def repeat(self, events: int = 1) -> None:
        """Send the newest `events` again, with their old sequence numbers."""
        for sent in self.log[-events:]:
            self.append(replace(sent, seq=self.seq))

    def forget_messages(self, keep: int) -> None:
        """Forget all messages but the newest `keep`. A subscriber that has not received the others is too slow."""
        forgotten = max(len(self.log) - keep, 0)
        if forgotten:
            self._first_seq = self.log[forgotten - 1].seq
            self._forgotten += forgotten
            del self.log[:forgotten]

    def forget_account(self, did: str) -> None:
        """Remove an account from the repo list."""
        self.listed.pop(did, None)

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

    async def list_repos(self, request: web.Request) -> web.Response:
        entries = [listed.entry(did) for did, listed in self.listed.items()]
        return page_response(request, entries, cursor_on_last_page=False)

    async def list_repos_by_collection(self, request: web.Request) -> web.Response:
        collection = request.query.get("collection", "")
        entries = [
            {"did": did}
            for did, listed in self.listed.items()
            if collection in listed.collections and did not in self.lagging
        ]
        return page_response(request, entries, cursor_on_last_page=False, max_limit=MAX_BY_COLLECTION)

    async def stop(self) -> None:
        """Break all connections and stop serving. The log remains for the next start."""
        self.abort_connections()
        await super().stop()

    async def stream(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        transport, cursor = request.transport, request.query.get("cursor")
        if transport is None:  # the client is already gone
            return
        self._streams.add(transport)
        try:
            position, outdated = self._start_position(cursor)
            if outdated:
                info = {"name": "OutdatedCursor", "message": "Requested cursor exceeded limit"}
                await socket.send_bytes(message_frame("#info", info))
            await self._send_from(socket, self._forgotten + position, live=cursor is None)
        except StreamError as error:
            await socket.send_bytes(error_frame(error.error, str(error)))
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=error.error.encode())
        finally:
            self._streams.discard(transport)

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

    async def _get_latest_commit(self, request: web.Request) -> web.Response:
        did, listed = self._known(request)
        if listed.status is not None:
            error = STATUS_ERRORS.get(listed.status, "RepoInactive")
            raise XrpcError(error, f"account is {listed.status}: {did}", 403)
        if listed.head is None or listed.rev is None:
            raise XrpcError("RepoNotSynchronized", f"no commit seen: {did}", 404)
        return web.json_response({"cid": cid.cid_text(listed.head), "rev": listed.rev})

    async def _get_repo_status(self, request: web.Request) -> web.Response:
        did, listed = self._known(request)
        state: dict[str, Any] = {"did": did, "active": listed.status is None}
        return web.json_response(state | ({"status": listed.status} if listed.status else {"rev": listed.rev}))

    def _known(self, request: web.Request) -> tuple[str, ListedAccount]:
        did = request.query.get("did", "")
        if did not in self.listed:
            raise XrpcError("RepoNotFound", f"account not found: {did}", 404)
        return did, self.listed[did]

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
                await (socket.send_str(frame.decode()) if frame in self._texts else socket.send_bytes(frame))
                position += 1
            live = True
            await self.appended.wait()


class FaultyAccount(LocalAccount):
    """An account that can move to another PDS."""

    pds: FaultyPds

    def deactivate(self) -> None:
        """Deactivate the account."""
        self.set_status("deactivated")

    def delete_account(self) -> None:
        """Delete the account at its PDS. The identity remains in the directory."""
        self.set_status("deleted")

    def migrate(self, to: FaultyPds, *, sign_again: bool = True) -> None:
        """Move to another PDS, with a new key.

        Args:
            to: The new PDS.
            sign_again: The new PDS makes a commit with the new key at once. Reference PDSes do not: there, `#sync` and
                exports contain the commit of the old PDS, signed with the old key, until the next write.
        """
        old, self.pds = self.pds, to
        to.hosted[self.did] = HostedRepo(self.repo, self.apply_writes)
        self.swap_key()
        if sign_again:
            self.apply_writes([], lost=True)
        self.publish_key()
        self._emit_account()
        self._emit_identity(handle=self.handle)
        self.emit_sync(rev=self.rev if sign_again else self._clock.tid())
        old.hosted[self.did].status = "deactivated"
        old.emit(self.did, "#account", self._event(active=False, status="deactivated"))


class FaultyNetwork(LocalNetwork):
    """The network, with any number of relays.

    Attributes:
        relays: Each one receives the events of all PDSes and numbers them in a sequence of its own.
        relay: The first relay.
    """

    plc: FaultyPlc
    pdses: Sequence[FaultyPds]
    relay: FaultyRelay
    accounts: Mapping[str, FaultyAccount]
    plc_type, pds_type, relay_type, account_type = FaultyPlc, FaultyPds, FaultyRelay, FaultyAccount

    def __init__(self, *, pds: int = 2, relays: int = 1) -> None:
        super().__init__(pds=pds)
        self.relays = [self.relay]
        for number in range(1, relays):
            relay = FaultyRelay(self.plc, number * RELAY_SEQ_DISTANCE)
            for host in self.pdses:
                relay.follow(host)
            self.relays.append(relay)
            self.servers.append(relay)

    @property
    def relay_urls(self) -> list[str]:
        """The websocket URLs of the relays, in the order of `relays`."""
        return [relay.url.replace("http", "ws", 1) for relay in self.relays]

    def create_account(
        self, handle: str | None = None, *, curve: Curve = "k256", pds: int | None = None
    ) -> FaultyAccount:
        return cast(FaultyAccount, super().create_account(handle, curve=curve, pds=pds))
