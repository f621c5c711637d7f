import json
from base64 import b64decode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.cbor import Link, decode_canonical
from indexer.atproto.cid import DAG_CBOR, RAW, cid_of
from indexer.localnet.dag_cbor import encode
from tests.localnet.independent_decoder import cid_from_text
from tests.vectors import vectors

CIDS = st.builds(
    lambda head, digest: head + digest, st.sampled_from([DAG_CBOR, RAW]), st.binary(min_size=32, max_size=32)
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary() | CIDS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(VALUES)
def test_strict_decoder_returns_encoded_value(value: Any) -> None:
    assert decode_canonical(encode(value)) == value


@given(CIDS)
def test_cid_is_encoded_as_link(cid: bytes) -> None:
    assert type(decode_canonical(encode(cid))) is Link


@pytest.mark.parametrize(
    "text", ["01b562eaaea6d8", "0171122000", "0155122000", "1220" + "00" * 32, "01711220" + "00" * 33]
)
def test_bytes_of_other_form_are_encoded_as_byte_string(text: str) -> None:
    assert type(decode_canonical(encode(bytes.fromhex(text)))) is bytes


def test_encoding_matches_published_vectors() -> None:
    for case in json.loads(vectors("atproto-interop-tests/data-model/data-model-fixtures.json").read_bytes()):
        block = encode(from_json(case["json"]))
        assert block == b64decode(case["cbor_base64"] + "==")
        assert cid_of(block) == cid_from_text(case["cid"])


@pytest.mark.parametrize("value", [1.5, {1}, 2**64])
def test_unsupported_value_is_refused(value: object) -> None:
    with pytest.raises((TypeError, OverflowError)):
        encode(value)


def from_json(value: Any) -> Any:
    """Convert AT Protocol JSON to plain values."""
    match value:
        case {"$link": text}:
            return cid_from_text(text)
        case {"$bytes": text}:
            return b64decode(text + "==")
        case dict():
            return {key: from_json(item) for key, item in value.items()}
        case list():
            return [from_json(item) for item in value]
    return value
