"""A PLC directory, which serves the identities of the local network, and the signed operations that made them."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any

from aiohttp import web

from indexer.atproto import plc
from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.did_document import build_did_document
from indexer.demo import dag_cbor
from indexer.demo.http_server import HttpServer
from indexer.demo.plc_operations import sign, tombstone, update

RECOVERY_KEY, HOST_KEY = (PrivateKey.from_seed("k256", seed) for seed in (b"recovery", b"host"))
ROTATION_KEYS = [key.public.did_key() for key in (RECOVERY_KEY, HOST_KEY)]
"""The rotation keys of all DIDs. The second one signs all operations except one that undoes a tombstone."""

MAX_LINES = 1_000
"""Lines of a page of the export."""
STREAM_INTERVAL = 0.05
"""Seconds between two looks for new operations."""

_CONTEXT = [
    "https://www.w3.org/ns/did/v1",
    "https://w3id.org/security/multikey/v1",
    "https://w3id.org/security/suites/secp256k1-2019/v1",
]


@dataclass(frozen=True, slots=True)
class LocalIdentity:
    """The identity that the directory has for a DID: `key` is a did:key, `pds` a URL."""

    handle: str
    key: str
    pds: str


@dataclass(slots=True)
class LoggedOperation:
    """A signed operation that the directory accepted.

    Attributes:
        seq: Its number among the operations of all DIDs, from 1.
    """

    seq: int
    did: str
    operation: Mapping[str, Any]
    cid: str
    created_at: datetime
    nullified: bool = False

    def entry(self) -> dict[str, Any]:
        """Return the entry in the audit log of the DID."""
        return {
            "did": self.did,
            "operation": self.operation,
            "cid": self.cid,
            "nullified": self.nullified,
            "createdAt": self.created_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        }

    def line(self) -> dict[str, Any]:
        """Return the line in the export with numbers, or the message of the stream."""
        entry = {name: value for name, value in self.entry().items() if name != "nullified"}
        return {"type": "sequenced_op", **entry, "seq": self.seq}


class LocalPlc(HttpServer):
    """The directory.

    Attributes:
        identities: The identity by DID; None for a tombstoned DID.
    """

    def __init__(self) -> None:
        super().__init__()
        self._identities: dict[str, LocalIdentity | None] = {}
        self.identities: Mapping[str, LocalIdentity | None] = self._identities
        self._logs: dict[str, list[LoggedOperation]] = {}
        self._seq = 0
        self._time = datetime.now(UTC)
        self.route("/export", self.export)
        self.route("/export/stream", self.stream)
        self.route("/{did}", self._resolve)
        self.route("/{did}/log/audit", self.audit_log)

    @property
    def operations(self) -> Sequence[LoggedOperation]:
        """The operations of all DIDs in the order of their acceptance."""
        return sorted((one for log in self._logs.values() for one in log), key=attrgetter("seq"))

    def publish(self, did: str, identity: LocalIdentity) -> None:
        """Append an operation that sets this identity. It undoes a tombstone.

        A new DID gets the operation that the DID is derived from before it.
        """
        log = self._logs.setdefault(did, [])
        if not log:
            self._append(did, _genesis(identity.handle))
        signer = HOST_KEY
        if did in self.identities and self.identities[did] is None:
            log[-1].nullified, signer = True, RECOVERY_KEY
        prev = next(one.cid for one in reversed(log) if not one.nullified)
        state = update(ROTATION_KEYS, prev, handle=identity.handle, signing_key=identity.key, pds=identity.pds)
        self._append(did, sign(state, signer))
        self._identities[did] = identity

    def end(self, did: str) -> None:
        """Append a tombstone. An identity that is published later undoes it."""
        self._append(did, sign(tombstone(self._logs[did][-1].cid), HOST_KEY))
        self._identities[did] = None

    def forget(self, did: str) -> None:
        """Remove a DID, so that it is unknown."""
        del self._logs[did], self._identities[did]

    def _append(self, did: str, operation: Mapping[str, Any]) -> None:
        self._seq += 1
        self._time = max(self._time + timedelta(milliseconds=1), datetime.now(UTC))  # a clock that always rises
        cid = cid_text(cid_of(dag_cbor.encode(operation)))
        self._logs[did].append(LoggedOperation(self._seq, did, operation, cid, self._time))

    async def _resolve(self, request: web.Request) -> web.Response:
        did = request.match_info["did"]
        if did not in self.identities:
            return _not_registered(did)
        identity = self.identities[did]
        if identity is None:
            return web.json_response({"message": f"DID not available: {did}"}, status=410)
        return web.json_response(did_document(did, identity), content_type="application/did+ld+json")

    async def audit_log(self, request: web.Request) -> web.Response:
        """Return all operations of a DID."""
        did = request.match_info["did"]
        if did not in self._logs:
            return _not_registered(did)
        return web.json_response([one.entry() for one in self._logs[did]])

    async def export(self, request: web.Request) -> web.Response:
        """Return the operations after a number, or else after a time."""
        after, count = request.query.get("after", ""), min(MAX_LINES, int(request.query.get("count", MAX_LINES)))
        if after.isdigit():
            lines = [one.line() for one in self.operations if one.seq > int(after)]
        else:
            lines = [entry for one in self.operations if (entry := one.entry())["createdAt"] > after]
        return web.Response(text="\n".join(map(json.dumps, lines[:count])), content_type="application/jsonlines")

    async def stream(self, request: web.Request) -> web.WebSocketResponse:
        """Send the operations after a number, or new ones, on a websocket."""
        socket, cursor = web.WebSocketResponse(), int(request.query.get("cursor", self._seq))
        await socket.prepare(request)
        if cursor > self._seq:
            await socket.close(message=b"FutureCursor")
        while not socket.closed:
            for one in self.operations:
                if one.seq > cursor:
                    await socket.send_json(one.line())
                    cursor = one.seq
            await asyncio.sleep(STREAM_INTERVAL)
        return socket


def did_of(handle: str) -> str:
    """Return the DID whose first operation has this handle: the same scenario always creates the same accounts."""
    return plc.did_of(dag_cbor.encode(_genesis(handle)))


def did_document(did: str, identity: LocalIdentity) -> dict[str, Any]:
    """Return the DID document of an identity."""
    return {"@context": _CONTEXT} | build_did_document(did, identity.handle, identity.key, identity.pds)


def _genesis(handle: str) -> dict[str, Any]:
    """Return a signed first operation that sets only the handle."""
    state = update(ROTATION_KEYS, None, handle=handle, signing_key="", pds="")
    return sign(state | {"verificationMethods": {}, "services": {}}, HOST_KEY)


def _not_registered(did: str) -> web.Response:
    return web.json_response({"message": f"DID not registered: {did}"}, status=404)
