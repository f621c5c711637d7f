import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.did_document import parse_did_document
from indexer.errors import UpstreamError
from tests.atproto.plc_operations import current_form, document_of
from tests.vectors import vectors

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
KEY = PrivateKey.from_seed("k256", b"document").public
OTHER = PrivateKey.from_seed("p256", b"another").public


def document(**changes: Any) -> dict[str, Any]:
    method = {
        "id": f"{DID}#atproto",
        "type": "Multikey",
        "controller": DID,
        "publicKeyMultibase": KEY.multikey(),
    }
    service = {
        "id": "#atproto_pds",
        "type": "AtprotoPersonalDataServer",
        "serviceEndpoint": "https://pds.example.com",
    }
    return {
        "id": DID,
        "alsoKnownAs": ["at://alice.test"],
        "verificationMethod": [method],
        "service": [service],
    } | changes


@pytest.mark.parametrize(
    ("name", "handle", "pds"),
    [
        ("did_plc_doc.json", "atproto.com", "https://bsky.social"),
        ("did_web_doc.json", None, None),
    ],
)
def test_published_documents_are_parsed(name: str, handle: str | None, pds: str | None) -> None:
    raw = json.loads(vectors(f"indigo/identity/{name}").read_text())
    parsed = parse_did_document(raw, raw["id"], allow_http=False)
    assert (parsed.handle, parsed.pds) == (handle, pds)
    assert (parsed.signing_key is not None) == (pds is not None)


def test_legacy_key_and_multikey_give_the_same_key() -> None:
    legacy = document()["verificationMethod"][0] | {
        "type": "EcdsaSecp256k1VerificationKey2019",
        "publicKeyMultibase": "zQYEBzXeuTM9UR3rfvNag6L3RNAs5pQZyYPsomTsgQhsxLdEgCrPTLgFna8y"
        "qCnxPpNT7DBk6Ym3dgPKNu86vt9GR",
    }
    multikey = document()["verificationMethod"][0] | {
        "publicKeyMultibase": "zQ3shXjHeiBuRCKmM36cuYnm7YEMzhGnCmCyW92sRJ9pribSF"
    }
    keys = [
        parse_did_document(document(verificationMethod=[method]), DID, allow_http=False).signing_key
        for method in (legacy, multikey)
    ]
    assert keys[0] == keys[1] is not None


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the DID and each operation of the published logs that is not a tombstone, in the current form."""
    for file in sorted(vectors("did-plc").rglob("*.json")):
        for entry in json.loads(file.read_text()):
            operation = current_form(entry["operation"])
            if operation["type"] != "plc_tombstone":
                yield entry["did"], operation


def test_documents_of_published_plc_operations_are_parsed() -> None:
    count = 0
    for did, operation in operations():
        parsed = parse_did_document(document_of(did, operation), did, allow_http=False)
        key = operation["verificationMethods"].get("atproto")
        pds = operation["services"].get("atproto_pds")
        handle = next((alias for alias in operation["alsoKnownAs"] if "." in alias), None)
        assert (parsed.signing_key and parsed.signing_key.did_key()) == key
        assert parsed.pds == (pds and pds["endpoint"])
        assert parsed.handle == (handle and handle.removeprefix("at://"))
        count += 1
    assert count > 20


def test_real_documents_have_a_key_and_a_pds() -> None:
    documents = json.loads(vectors("jetstream-frames/did_docs.json").read_text())
    assert len(documents) > 50
    for did, raw in documents.items():
        parsed = parse_did_document(raw, did, allow_http=False)
        assert parsed.signing_key is not None
        assert parsed.pds is not None
        assert parsed.pds.startswith("https://")


def test_first_valid_key_is_used() -> None:
    valid = document()["verificationMethod"][0]
    second = valid | {"publicKeyMultibase": OTHER.multikey()}
    for invalid in (
        valid | {"id": "did:plc:other#atproto"},
        valid | {"id": "#atproto_other"},
        valid | {"controller": "did:plc:other"},
        valid | {"publicKeyMultibase": "zQ3sh"},
        valid | {"publicKeyMultibase": 7},
        valid | {"type": "Ed25519VerificationKey2020"},
        "not a map",
    ):
        parsed = parse_did_document(document(verificationMethod=[invalid, second, valid]), DID, allow_http=False)
        assert parsed.signing_key == OTHER
    relative = parse_did_document(document(verificationMethod=[valid | {"id": "#atproto"}]), DID, allow_http=False)
    assert relative.signing_key == KEY


@pytest.mark.parametrize(
    "url",
    [
        "http://pds.example.com",
        "https://user:secret@pds.example.com",
        "https://pds.example.com/path",
        "https://pds.example.com?x",
        "https://pds.example.com#x",
        "https://",
        "ftp://pds.example.com",
        "https://pds.example.com:99999",
        "https://pds.example.com:65536",
        "https://" + "a" * 2_041,
        "https://pds.exa mple.com",
        "https://[::1",
        "https://pds.example.com:0",
        "https://pds.example.com:",
        "https://pds.example.com//",
        "https://pds.example.com\\@evil.example",
        "https://pds.example.com\n",
        "https://pds.example.com\t",
        "https://pds\uff0eexample.com",
        "https:pds.example.com",
        "//pds.example.com",
        "https://" + "a" * 3_000,
        7,
        None,
    ],
)
def test_pds_is_none_if_it_is_not_a_base_url(url: Any) -> None:
    service = document()["service"][0] | {"serviceEndpoint": url}
    assert parse_did_document(document(service=[service]), DID, allow_http=False).pds is None


@pytest.mark.parametrize(
    ("url", "pds"),
    [
        ("https://pds.example.com/", "https://pds.example.com"),
        ("HTTPS://PDS.example.com:8443", "https://pds.example.com:8443"),
        ("https://[2600::1]:443/", "https://[2600::1]:443"),
        ("https://my_pds.example.com", "https://my_pds.example.com"),
        ("https://pds.example.com:1", "https://pds.example.com:1"),
        ("https://pds.example.com:65535", "https://pds.example.com:65535"),
        ("https://" + "a" * 2_040, "https://" + "a" * 2_040),
    ],
)
def test_pds_is_scheme_host_and_port(url: str, pds: str) -> None:
    service = document()["service"][0] | {"id": f"{DID}#atproto_pds", "serviceEndpoint": url}
    assert parse_did_document(document(service=[service]), DID, allow_http=False).pds == pds


def test_first_pds_is_used_even_if_its_url_is_invalid() -> None:
    valid = document()["service"][0]
    others = [
        valid | {"id": "#atproto_labeler"},
        valid | {"type": "Other"},
        valid | {"id": "did:plc:other#atproto_pds"},
    ]
    assert (
        parse_did_document(document(service=[*others, valid]), DID, allow_http=False).pds == "https://pds.example.com"
    )
    invalid = valid | {"serviceEndpoint": "pds.example.com"}
    assert parse_did_document(document(service=[invalid, valid]), DID, allow_http=False).pds is None


def test_http_url_is_accepted_with_allow_http() -> None:
    service = document()["service"][0] | {"serviceEndpoint": "http://localhost:2583/"}
    assert parse_did_document(document(service=[service]), DID, allow_http=True).pds == "http://localhost:2583"


def test_first_handle_with_valid_syntax_is_used() -> None:
    aliases = [7, "https://alice.test", "at://no_handle", "at://alice.test/x", "at://Alice.Test", "at://bob.test"]
    assert parse_did_document(document(alsoKnownAs=aliases), DID, allow_http=False).handle == "alice.test"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just(DID) | st.just("#atproto"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["id", "type", "controller", "publicKeyMultibase", "serviceEndpoint", "x"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON, JSON)
def test_parts_of_any_shape_are_accepted(methods: Any, services: Any, aliases: Any) -> None:
    raw = document(verificationMethod=methods, service=services, alsoKnownAs=aliases)
    assert parse_did_document(raw, DID, allow_http=True).did == DID


@given(JSON)
def test_json_that_is_not_a_document_of_the_did_is_rejected(raw: Any) -> None:
    if isinstance(raw, dict) and raw.get("id") == DID:
        return
    with pytest.raises(UpstreamError):
        parse_did_document(raw, DID, allow_http=True)
