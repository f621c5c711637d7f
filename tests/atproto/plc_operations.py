"""Operations of the PLC directory, and the DID documents that follow from them."""

from typing import Any


def current_form(operation: dict[str, Any]) -> dict[str, Any]:
    """Return an operation in the current form. The oldest operations have type `create` and other fields."""
    if operation["type"] != "create":
        return operation
    pds = {"type": "AtprotoPersonalDataServer", "endpoint": operation["service"]}
    return operation | {
        "alsoKnownAs": [f"at://{operation['handle']}"],
        "services": {"atproto_pds": pds},
        "verificationMethods": {"atproto": operation["signingKey"]},
    }


def document_of(did: str, operation: dict[str, Any]) -> dict[str, Any]:
    """Return the DID document after an operation in the current form. As in real ones, some ids are relative."""
    methods = [
        {
            "id": f"{did}#{name}",
            "type": "Multikey",
            "controller": did,
            "publicKeyMultibase": key.removeprefix("did:key:"),
        }
        for name, key in operation["verificationMethods"].items()
    ]
    services = [
        {"id": f"#{name}", "type": service["type"], "serviceEndpoint": service["endpoint"]}
        for name, service in operation["services"].items()
    ]
    return {"id": did, "alsoKnownAs": operation["alsoKnownAs"], "verificationMethod": methods, "service": services}
