import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.did_document import parse_did_document
from indexer.errors import UpstreamError
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
def test_published_documents(name: str, handle: str | None, pds: str | None) -> None:
    raw = json.loads(vectors(f"indigo/identity/{name}").read_text())
    parsed = parse_did_document(raw, raw["id"], allow_http=False)
    if handle:
        assert (parsed.handle, parsed.pds) == (handle, pds)
        assert parsed.signing_key is not None


def test_the_same_key_in_its_old_and_new_form() -> None:
    old = document()["verificationMethod"][0] | {
        "type": "EcdsaSecp256k1VerificationKey2019",
        "publicKeyMultibase": "zQYEBzXeuTM9UR3rfvNag6L3RNAs5pQZyYPsomTsgQhsxLdEgCrPTLgFna8y"
        "qCnxPpNT7DBk6Ym3dgPKNu86vt9GR",
    }
    new = document()["verificationMethod"][0] | {
        "publicKeyMultibase": "zQ3shXjHeiBuRCKmM36cuYnm7YEMzhGnCmCyW92sRJ9pribSF"
    }
    keys = [
        parse_did_document(document(verificationMethod=[method]), DID, allow_http=False).signing_key
        for method in (old, new)
    ]
    assert keys[0] == keys[1] is not None


def test_real_documents_of_the_firehose() -> None:
    documents = json.loads(vectors("jetstream-frames/did_docs.json").read_text())
    assert len(documents) > 50
    for did, raw in documents.items():
        parsed = parse_did_document(raw, did, allow_http=False)
        assert parsed.signing_key is not None
        assert parsed.pds is not None
        assert parsed.pds.startswith("https://")


def test_the_first_valid_key_wins() -> None:
    good = document()["verificationMethod"][0]
    second = good | {"publicKeyMultibase": OTHER.multikey()}
    for bad in (
        good | {"id": "did:plc:other#atproto"},
        good | {"id": "#atproto_other"},
        good | {"controller": "did:plc:other"},
        good | {"publicKeyMultibase": "zQ3sh"},
        good | {"publicKeyMultibase": 7},
        good | {"type": "Ed25519VerificationKey2020"},
        "not a map",
    ):
        parsed = parse_did_document(document(verificationMethod=[bad, second, good]), DID, allow_http=False)
        assert parsed.signing_key == OTHER
    relative = parse_did_document(document(verificationMethod=[good | {"id": "#atproto"}]), DID, allow_http=False)
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
        "https://pds.exa mple.com",
        "https://[::1",
        7,
        None,
    ],
)
def test_a_pds_that_is_no_base_url_is_none(url: Any) -> None:
    service = document()["service"][0] | {"serviceEndpoint": url}
    assert parse_did_document(document(service=[service]), DID, allow_http=False).pds is None


def test_http_is_for_local_networks() -> None:
    service = document()["service"][0] | {"serviceEndpoint": "http://localhost:2583/"}
    assert parse_did_document(document(service=[service]), DID, allow_http=True).pds == "http://localhost:2583"


def test_the_first_handle_of_good_syntax_wins() -> None:
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
def test_no_shape_of_json_breaks_it(methods: Any, services: Any, aliases: Any) -> None:
    raw = document(verificationMethod=methods, service=services, alsoKnownAs=aliases)
    assert parse_did_document(raw, DID, allow_http=True).did == DID


@given(JSON)
def test_anything_else_than_a_document_of_the_did_is_refused(raw: Any) -> None:
    if isinstance(raw, dict) and raw.get("id") == DID:
        return
    with pytest.raises(UpstreamError):
        parse_did_document(raw, DID, allow_http=True)
