"""A recording of a real network, played: frames by a relay, identities by a directory, exports by hosts.

The recording holds what two PDSes sent, the directory's audit log, the final exports and the ground truth. What
the network lacks is a relay; this one merges the two streams by time, numbers them anew, and, as relays do, leaves
out what a host sends for an account that has moved away from it.
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
from typing import Any, cast

import cbrrr
from aiohttp import web
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

ARCHIVE = Path(__file__).parents[1] / "data" / "recording.tar.xz"
FIRST_PORT = 46327  # of the host numbered 0, in the recorded documents


@dataclass(frozen=True, slots=True)
class Recorded:
    """One frame as the relay sends it, and when its host had stamped it (RFC 3339, comparable as text)."""

    seq: int
    time: str
    did: str
    type: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class Truth:
    """What the network holds in the end for one account."""

    did: str
    active: bool
    status: str | None
    rev: str | None
    records: dict[str, str]


class Recording:
    """The archive, unpacked in memory."""

    def __init__(self, archive: Path = ARCHIVE) -> None:
        with tarfile.open(archive) as tar:
            self._files = {
                member.name.removeprefix("recording/"): file.read()
                for member in tar
                if (file := tar.extractfile(member)) is not None
            }
        self.audit: dict[str, list[dict[str, Any]]] = json.loads(self._files["plc_audit.json"])
        self.truth = [
            Truth(line["did"], line["active"], line["status"], line.get("rev"), line.get("records", {}))
            for line in map(json.loads, self._files["ground_truth.jsonl"].splitlines())
        ]
        self.frames = [
            Recorded(seq, payload["time"], _did(payload), header["t"], _frame(header, payload | {"seq": seq}))
            for seq, (header, payload) in enumerate(self._merged(), start=1)
        ]

    def operation(self, did: str, at: str | None) -> dict[str, Any] | None:
        """The directory's valid operation for `did` at the time `at`; the last one without a time."""
        valid = [entry for entry in self.audit.get(did, []) if not entry["nullified"]]
        past = [entry for entry in valid if at is None or entry["createdAt"] <= at]
        # an account is in the directory before its host says a word of it
        return (past or valid[:1] or [{}])[-1].get("operation")

    def export(self, did: str) -> bytes | None:
        return self._files.get(f"cars/{did.replace(':', '_')}.car")

    def _merged(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        streams = [
            [(payload["time"], host, header, payload) for header, payload in self._stream(host)] for host in (0, 1)
        ]
        for _, host, header, payload in sorted(streams[0] + streams[1], key=lambda entry: entry[0]):
            if self._host(_did(payload), payload["time"]) == host:
                yield header, payload

    def _stream(self, host: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        file = io.BytesIO(self._files[f"pds{host}.live.frames"])
        while size := file.read(4):
            yield _parts(file.read(int.from_bytes(size, "big")))

    def _host(self, did: str, at: str) -> int | None:
        operation = self.operation(did, at)
        if operation is None:
            return None
        return 0 if operation["services"]["atproto_pds"]["endpoint"].endswith(str(FIRST_PORT)) else 1


@cache
def recording() -> Recording:
    return Recording()


class PlayedNetwork:
    """Relay, directory and hosts on loopback. The directory is at `now`; None means after everything."""

    def __init__(self, played: Recording) -> None:
        self.recording = played
        self.now: str | None = None
        self.sent = 0
        self.exports_asked: list[str] = []
        self.relay_url = ""
        self.http_url = ""
        self._allowed = 0
        self._more = asyncio.Condition()

    async def allow(self, up_to: int) -> None:
        """Lets the relay send frames up to the sequence number `up_to`."""
        async with self._more:
            self._allowed = up_to
            self._more.notify_all()

    async def stream(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        _, _, cursor = socket.request.path.partition("cursor=")
        try:
            for recorded in self.recording.frames[int(cursor or 0) :]:
                async with self._more:
                    await self._more.wait_for(lambda seq=recorded.seq: seq <= self._allowed)  # type: ignore[misc]
                await socket.send(recorded.frame)
                self.sent = recorded.seq
            await socket.wait_closed()
        except ConnectionClosed:
            return

    async def document(self, request: web.Request) -> web.Response:
        did = request.match_info["did"]
        operation = self.recording.operation(did, self.now)
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

    async def latest(self, request: web.Request) -> web.Response:
        """The last commit that was sent."""
        did = request.query["did"]
        for recorded in reversed(self.recording.frames[: self.sent]):
            if recorded.did == did and recorded.type == "#commit":
                _, payload = _parts(recorded.frame)
                return web.json_response({"cid": payload["commit"].encode(), "rev": payload["rev"]})
        return web.json_response({"error": "RepoNotFound", "message": did}, status=400)

    async def export(self, request: web.Request) -> web.Response:
        did = request.query["did"]
        self.exports_asked.append(did)
        car = self.recording.export(did)
        if car is None:
            return web.json_response({"error": "RepoNotFound", "message": did}, status=400)
        return web.Response(body=car, content_type="application/vnd.ipld.car")


@asynccontextmanager
async def played(what: Recording) -> AsyncIterator[PlayedNetwork]:
    """The recording's network, with nothing sent yet."""
    network = PlayedNetwork(what)
    app = web.Application()
    app.router.add_get("/xrpc/com.atproto.sync.getRepo", network.export)
    app.router.add_get("/xrpc/com.atproto.sync.getLatestCommit", network.latest)
    app.router.add_get("/{did:did:.+}", network.document)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        network.http_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with serve(network.stream, "127.0.0.1", 0, compression=None) as server:
            network.relay_url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            yield network
    finally:
        await runner.cleanup()


def _did(payload: dict[str, Any]) -> str:
    did = payload.get("repo") or payload.get("did")
    assert isinstance(did, str)
    return did


def _parts(frame: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    header, payload = cast("Any", cbrrr.decode_multi_dag_cbor_in_violation_of_the_spec(frame))
    return header, payload


def _frame(header: dict[str, Any], payload: dict[str, Any]) -> bytes:
    return cbrrr.encode_dag_cbor(header) + cbrrr.encode_dag_cbor(payload)
