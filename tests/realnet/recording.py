"""A replay of a recorded real network: a relay, a directory and a host.

The recording contains the streams of two PDSs, the audit log of the directory, the final exports, and the final records
of each account. The relay merges the two streams by time and assigns new sequence numbers. Like a real relay, it drops
messages for accounts that are no longer on the PDS that sent them.
"""

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from indexer.demo import dag_cbor
from tests.demo.independent_decoder import decode_frame

ARCHIVE = Path(__file__).parents[1] / "data" / "recording.tar.xz"
FIRST_PDS_PORT = 46327
"""Port of the first PDS in the recorded identities."""


@dataclass(frozen=True, slots=True)
class RecordedFrame:
    """A frame as the relay sends it.

    Attributes:
        time: The timestamp of the PDS (RFC 3339, comparable as text).
    """

    seq: int
    time: str
    did: str
    type: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class FinalState:
    """The state of one account at the end of the recording."""

    did: str
    active: bool
    status: str | None
    rev: str | None
    records: dict[str, str]


class Recording:
    """The content of the archive."""

    def __init__(self, archive: Path = ARCHIVE) -> None:
        with tarfile.open(archive) as tar:
            self._files: dict[str, bytes] = {
                member.name.removeprefix("recording/"): file.read()
                for member in tar
                if (file := tar.extractfile(member)) is not None
            }
        self.audit: dict[str, list[dict[str, Any]]] = json.loads(self._files["plc_audit.json"])
        self.accounts = [
            FinalState(line["did"], line["active"], line["status"], line.get("rev"), line.get("records", {}))
            for line in map(json.loads, self._files["ground_truth.jsonl"].splitlines())
        ]
        self.frames = [
            RecordedFrame(seq, payload["time"], _did(payload), header["t"], _encode(header, payload | {"seq": seq}))
            for seq, (header, payload) in enumerate(self._merged(), start=1)
        ]

    def operation(self, did: str, at: str | None) -> dict[str, Any] | None:
        """Return the PLC operation that was valid for `did` at the time `at`, or at the end if `at` is None."""
        valid = [entry for entry in self.audit.get(did, []) if not entry["nullified"]]
        past = [entry for entry in valid if at is None or entry["createdAt"] <= at]
        # The directory has an account before its PDS sends a message about it.
        return (past or valid[:1] or [{}])[-1].get("operation")

    def export(self, did: str) -> bytes | None:
        return self._files.get(f"cars/{did.replace(':', '_')}.car")

    def _merged(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        streams = [[(payload["time"], pds, header, payload) for header, payload in self._stream(pds)] for pds in (0, 1)]
        for _, pds, header, payload in sorted(streams[0] + streams[1], key=lambda entry: entry[0]):
            if self._pds(_did(payload), payload["time"]) == pds:
                yield header, payload

    def _stream(self, pds: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        file = io.BytesIO(self._files[f"pds{pds}.live.frames"])
        while size := file.read(4):
            yield decode_frame(file.read(int.from_bytes(size, "big")))

    def _pds(self, did: str, at: str) -> int | None:
        operation = self.operation(did, at)
        if operation is None:
            return None
        return 0 if operation["services"]["atproto_pds"]["endpoint"].endswith(str(FIRST_PDS_PORT)) else 1


@cache
def recording() -> Recording:
    return Recording()


class ReplayedNetwork:
    """A relay, a directory and a host on loopback.

    Attributes:
        directory_time: The directory returns identities of this time; None: of the end of the recording.
        sent: The sequence number of the last frame that was sent.
        exports: The DIDs whose exports were requested.
    """

    def __init__(self, recorded: Recording) -> None:
        self.recording = recorded
        self.directory_time: str | None = None
        self.sent = 0
        self.exports: list[str] = []
        self.relay_url = ""
        self.http_url = ""
        self._last_allowed = 0
        self._allowed_more = asyncio.Condition()

    async def allow(self, up_to: int) -> None:
        """Let the relay send frames up to the sequence number `up_to`."""
        async with self._allowed_more:
            self._last_allowed = up_to
            self._allowed_more.notify_all()

    async def subscribe(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        _, _, cursor = socket.request.path.partition("cursor=")
        try:
            for frame in self.recording.frames[int(cursor or 0) :]:
                async with self._allowed_more:
                    await self._allowed_more.wait_for(lambda seq=frame.seq: seq <= self._last_allowed)  # type: ignore[misc]
                await socket.send(frame.frame)
                self.sent = frame.seq
            await socket.wait_closed()
        except ConnectionClosed:
            return

    async def document(self, request: web.Request) -> web.Response:
        did = request.match_info["did"]
        operation = self.recording.operation(did, self.directory_time)
        if operation is None:
            return web.json_response({"message": f"DID not registered: {did}"}, status=404)
        method = {
            "id": f"{did}#atproto",
            "type": "Multikey",
            "controller": did,
            "publicKeyMultibase": operation["verificationMethods"]["atproto"].removeprefix("did:key:"),
        }
        service = {"id": "#atproto_pds", "type": "AtprotoPersonalDataServer", "serviceEndpoint": self.http_url}
        return web.json_response(
            {
                "id": did,
                "alsoKnownAs": operation["alsoKnownAs"],
                "verificationMethod": [method],
                "service": [service],
            }
        )

    async def latest_commit(self, request: web.Request) -> web.Response:
        """Respond with the last commit that was sent."""
        did = request.query["did"]
        for frame in reversed(self.recording.frames[: self.sent]):
            if frame.did == did and frame.type == "#commit":
                _, payload = decode_frame(frame.frame)
                return web.json_response({"cid": payload["commit"].encode(), "rev": payload["rev"]})
        return web.json_response({"error": "RepoNotFound", "message": did}, status=400)

    async def export(self, request: web.Request) -> web.Response:
        did = request.query["did"]
        self.exports.append(did)
        car = self.recording.export(did)
        if car is None:
            return web.json_response({"error": "RepoNotFound", "message": did}, status=400)
        return web.Response(body=car, content_type="application/vnd.ipld.car")


@asynccontextmanager
async def replayed_network(recorded: Recording) -> AsyncIterator[ReplayedNetwork]:
    """Serve the recorded network. The relay sends nothing until `allow` is called."""
    network = ReplayedNetwork(recorded)
    app = web.Application()
    app.router.add_get("/xrpc/com.atproto.sync.getRepo", network.export)
    app.router.add_get("/xrpc/com.atproto.sync.getLatestCommit", network.latest_commit)
    app.router.add_get("/{did:did:.+}", network.document)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        network.http_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with serve(network.subscribe, "127.0.0.1", 0, compression=None) as server:
            network.relay_url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            yield network
    finally:
        await runner.cleanup()


def _did(payload: dict[str, Any]) -> str:
    did = payload.get("repo") or payload.get("did")
    assert isinstance(did, str)
    return did


def _encode(header: dict[str, Any], payload: dict[str, Any]) -> bytes:
    return dag_cbor.encode(header) + dag_cbor.encode(payload)
