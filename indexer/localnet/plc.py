"""The PLC directory: DID documents."""

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from indexer.localnet.server import Answer, Server, json_answer

_CONTEXT = [
    "https://www.w3.org/ns/did/v1",
    "https://w3id.org/security/multikey/v1",
    "https://w3id.org/security/suites/secp256k1-2019/v1",
]


@dataclass(frozen=True, slots=True)
class Identity:
    """What the directory holds of a DID: `key` is a did:key, `pds` the URL of its host."""

    handle: str
    key: str
    pds: str


class Plc(Server):
    """`identities` is what the directory says of every DID, None for a tombstone; to be changed by anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.identities: dict[str, Identity | None] = {}
        self.route("/{did}", self._resolve)

    def _resolve(self, request: web.Request) -> Answer:
        did = request.match_info["did"]
        if did not in self.identities:
            return json_answer({"message": f"DID not registered: {did}"}, 404)
        identity = self.identities[did]
        if identity is None:
            return json_answer({"message": f"DID not available: {did}"}, 404)
        return json_answer(did_document(did, identity), content_type="application/did+ld+json")


def did_document(did: str, identity: Identity) -> dict[str, Any]:
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
