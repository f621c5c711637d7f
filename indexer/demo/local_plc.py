"""A PLC directory: serves the DID documents of the local network."""

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from indexer.demo.http_server import HttpServer, ServerResponse, json_response

_CONTEXT = [
    "https://www.w3.org/ns/did/v1",
    "https://w3id.org/security/multikey/v1",
    "https://w3id.org/security/suites/secp256k1-2019/v1",
]


@dataclass(frozen=True, slots=True)
class LocalIdentity:
    """The identity that the directory has for a DID.

    Attributes:
        handle: The handle, without `at://`.
        key: The signing key as a did:key.
        pds: The URL of the account's PDS.
    """

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

    def _resolve(self, request: web.Request) -> ServerResponse:
        did = request.match_info["did"]
        if did not in self.identities:
            return json_response({"message": f"DID not registered: {did}"}, 404)
        identity = self.identities[did]
        if identity is None:
            return json_response({"message": f"DID not available: {did}"}, 410)
        return json_response(did_document(did, identity), content_type="application/did+ld+json")


def did_document(did: str, identity: LocalIdentity) -> dict[str, Any]:
    """Return the DID document of an identity."""
    return {
        "@context": _CONTEXT,
        "id": did,
        "alsoKnownAs": [f"at://{identity.handle}"],
        "verificationMethod": [
            {
                "id": f"{did}#atproto",
                "type": "Multikey",
                "controller": did,
                "publicKeyMultibase": identity.key.removeprefix("did:key:"),
            }
        ],
        "service": [{"id": "#atproto_pds", "type": "AtprotoPersonalDataServer", "serviceEndpoint": identity.pds}],
    }
