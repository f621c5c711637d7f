from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.did_document import parse_did_document
from indexer.errors import UpstreamError

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
KEY = PrivateKey.from_seed("k256", b"document").public
OTHER = PrivateKey.from_seed("p256", b"another").public


def document(**changes: Any) -> dict[str, Any]:
    method = {"id": f"{DID}#atproto", "type": "Multikey", "controller": DID, "publicKeyMultibase": KEY.multikey()}
    service = {"id": "#atproto_pds", "type": "AtprotoPersonalDataServer", "serviceEndpoint": "https://pds.example.com"}
    return {
        "id": DID,
        "alsoKnownAs": ["at://alice.test"],
        "verificationMethod": [method],
        "service": [service],
    } | changes


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


INVALID_URLS = r"""
    http://pds.example.com https://user:secret@pds.example.com https:// ftp://pds.example.com
    https://pds.example.com:99999 https://pds.example.com:65536 https://[::1 https://pds.example.com:0
    https://pds.example.com\@evil.example https:pds.example.com //pds.example.com
"""
BASE = "https://pds.example.com"


@pytest.mark.parametrize(
    "url",
    [
        *INVALID_URLS.split(), "https://pds.exa mple.com", "https://pds\n.example.com",
        "https://pds\uff0eexample.com", "https://" + "a" * 2_041, "https://" + "a" * 3_000, 7, None,
    ],
)  # fmt: skip
def test_pds_is_none_if_it_is_not_a_base_url(url: Any) -> None:
    service = document()["service"][0] | {"serviceEndpoint": url}
    assert parse_did_document(document(service=[service]), DID, allow_http=False).pds is None


@pytest.mark.parametrize(
    ("url", "pds"),
    [
        ("https://pds.example.com/", BASE),
        ("HTTPS://PDS.example.com:8443", f"{BASE}:8443"),
        ("https://[2600::1]:443/", "https://[2600::1]:443"),
        *[
            (f"{BASE}{rest}", BASE)
            for rest in ("/xrpc", "//", "?x", "#x", "/a?b=@c#d", "\n", ":", ":/", "?@evil.example")
        ],
        *[(url, url) for url in ("https://my_pds.example.com", f"{BASE}:1", f"{BASE}:65535", "https://" + "a" * 2_040)],
    ],
)
def test_pds_is_scheme_host_and_port(url: str, pds: str) -> None:
    service = document()["service"][0] | {"id": f"{DID}#atproto_pds", "serviceEndpoint": url}
    assert parse_did_document(document(service=[service]), DID, allow_http=False).pds == pds


def test_first_pds_is_used_even_if_its_url_is_invalid() -> None:
    valid = document()["service"][0]
    others = [valid | {"id": "#atproto_labeler"}, valid | {"type": "Other"}, valid | {"id": "did:plc:o#atproto_pds"}]
    assert parse_did_document(document(service=[*others, valid]), DID, allow_http=False).pds == BASE
    invalid = valid | {"serviceEndpoint": "pds.example.com"}
    assert parse_did_document(document(service=[invalid, valid]), DID, allow_http=False).pds is None
    of_types = valid | {"type": ["Other", "AtprotoPersonalDataServer"]}
    assert parse_did_document(document(service=[of_types]), DID, allow_http=False).pds == BASE
    local = valid | {"serviceEndpoint": "http://localhost:2583/"}
    assert parse_did_document(document(service=[local]), DID, allow_http=True).pds == "http://localhost:2583"


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
