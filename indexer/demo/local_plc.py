"""A PLC directory, which serves the DID documents of the local network."""

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from indexer.atproto.did_document import build_did_document
from indexer.demo.http_server import HttpServer

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


class LocalPlc(HttpServer):
    """The directory. Tests may change `identities` directly.

    Attributes:
        identities: The identity by DID; None for a tombstoned DID.
    """

    def __init__(self) -> None:
        super().__init__()
        self.identities: dict[str, LocalIdentity | None] = {}
        self.route("/{did}", self._resolve)

    async def _resolve(self, request: web.Request) -> web.Response:
        did = request.match_info["did"]
        if did not in self.identities:
            return web.json_response({"message": f"DID not registered: {did}"}, status=404)
        identity = self.identities[did]
        if identity is None:
            return web.json_response({"message": f"DID not available: {did}"}, status=410)
        return web.json_response(did_document(did, identity), content_type="application/did+ld+json")


def did_document(did: str, identity: LocalIdentity) -> dict[str, Any]:
    """Return the DID document of an identity."""
    return {"@context": _CONTEXT} | build_did_document(did, identity.handle, identity.key, identity.pds)
